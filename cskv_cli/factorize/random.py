"""Random factors (Kaiming, as a fresh linear layer has them): the floor of the paper's Table 2."""

from typing import Any

import torch


def factorize(weight: torch.Tensor, rank: int, context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B drawn uniformly from +-1/sqrt(fan-in)."""
    shapes = (weight.shape[0], rank), (rank, weight.shape[1])
    return tuple(
        (torch.rand(shape, generator=context.generator, dtype=weight.dtype) * 2 - 1) / shape[0] ** 0.5
        for shape in shapes
    )
