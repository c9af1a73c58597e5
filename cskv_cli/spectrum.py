"""How much of a K or V cache a low rank keeps, from its singular values."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ENERGIES = (0.90, 0.95, 0.99)


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one layer's K or V cache.

    Attributes:
        singular_values: [channels], float64, descending; in units of the cache, over all tokens together.
    """

    singular_values: Tensor

    @property
    def channels(self) -> int:
        """Width of the cache: num_key_value_heads * head_dim."""
        return len(self.singular_values)

    @cached_property
    def shares(self) -> Tensor:
        """[channels]: each direction's share of the energy (the squared Frobenius norm of the cache).

        An all-zero cache counts as one direction that holds everything: nothing is lost at any rank.
        """
        squares = self.singular_values.square()
        if not squares.any():
            squares[0] = 1
        return squares / squares.sum()

    @property
    def energy(self) -> Tensor:
        """[channels]: the share of the energy that the best rank 1, 2, ... keeps; the last is 1."""
        return self.shares.cumsum(0).clamp(max=1)

    def rank_for(self, energy: float) -> int:
        """The smallest rank that keeps this share of the energy, 0 < energy < 1."""
        return min(int((self.energy < energy).sum()) + 1, self.channels)

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of `shares` (Roy and Vetterli 2007, on squared singular values): 1 to channels."""
        return float(torch.special.entr(self.shares).sum().exp())

    def relative_error(self, ratio: float) -> float:
        """||K - K_r||_F / ||K||_F of the best rank r at this ratio: no method does better on the calibration data."""
        return float(self.shares[rank_at(ratio, self.channels) :].sum().sqrt())


def rank_at(ratio: float, channels: int) -> int:
    """Channels kept when this share of them is removed, at least 1."""
    return max(1, round((1 - ratio) * channels))


def cache_spectrum(gram: Tensor, weight: Tensor) -> Spectrum:
    """The singular values of the cache X W, without X (nor any bias, which CSKV never factorizes).

    They are the roots of the eigenvalues of (X W)^T (X W) = W^T C W. A float32 Gram resolves them down to
    about 3e-4 of the largest; what lies below is rounding.

    Args:
        gram: C = X^T X [hidden, hidden] of the layer's input X [tokens, hidden].
        weight: the projection W [hidden, channels].
    """
    weight = weight.double()
    squares = torch.linalg.eigvalsh(weight.T @ gram.double() @ weight)
    return Spectrum(squares.clamp(min=0).sqrt().flip(0))
