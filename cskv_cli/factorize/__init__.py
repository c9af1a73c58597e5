"""Low-rank factorizations of a key or value projection: one file per method, and the registry of them.

A method takes `W` [hidden, channels] in float64, a rank and a `Context`, and gives `A` [hidden, rank] and
`B` [rank, channels] with `A @ B` close to `W` (paper, eq. 1). For groups of heads see `groups`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cskv_cli.factorize import asvd, random, svd, whitened
from cskv_cli.factorize.groups import product


@dataclass(frozen=True)
class Context:
    """What a method may use beside the weight.

    Attributes:
        gram: X^T X of the layer's attention input X, [hidden, hidden], float64.
        mean_abs: mean |x| of each input channel, [hidden], float64.
        alpha: exponent of asvd's scaling.
        generator: the source of randomness.
    """

    gram: torch.Tensor
    mean_abs: torch.Tensor
    alpha: float
    generator: torch.Generator


Method = Callable[[torch.Tensor, int, Context], tuple[torch.Tensor, torch.Tensor]]

METHODS: dict[str, Method] = {
    "whitened": whitened.factorize,
    "asvd": asvd.factorize,
    "svd": svd.factorize,
    "random": random.factorize,
}


def squared_error(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gram: torch.Tensor) -> tuple[float, float]:
    """||X W - X A B||^2 and ||X W||^2 over the calibration tokens X, from their Gram: tr(D^T C D) (paper, eq. 1)."""
    difference = weight - product(a, b)
    return tuple(torch.einsum("ic,ij,jc->", part, gram, part).item() for part in (difference, weight))
