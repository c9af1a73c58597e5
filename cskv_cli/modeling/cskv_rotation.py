"""RoPE taken apart, so that a decode step rotates its one query and not every key.

Every rotation that transformers applies to a key k at position j has the form `k * cos_j + (k * sin_j) Q`, where Q
takes each pair of dimensions a quarter turn on: it moves each number to one other place, or that and its sign. The
score of a query q is then

    q . rotate_j(k) = [q, q Q^T] . [k * cos_j, k * sin_j]
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rotates keys [batch, heads, tokens, head_dim], given cos and sin [1 or batch, tokens, rotated dimensions]."""


class Turn(NamedTuple):
    """The rotation of some tokens.

    Attributes:
        places, signs: [q, q Q^T] is q[places] * signs; [2 * head_dim] each.
        factors: cos and sin of the tokens as above, [1 or batch, 1, 2, head_dim, tokens].
    """

    places: torch.Tensor
    signs: torch.Tensor
    factors: torch.Tensor

    def turned(self, query: torch.Tensor) -> torch.Tensor:
        """A query [..., head_dim] as keys that are `applied` meet it: [..., 2 * head_dim]."""
        return query.index_select(-1, self.places) * self.signs

    def applied(self, keys: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Keys [batch, heads, head_dim, tokens] as a turned query meets them: [batch, heads, 2 * head_dim, tokens].

        The first of them is token `start` of those that this is the rotation of.
        """
        return (keys.unsqueeze(2) * self.factors[..., start : start + keys.shape[-1]]).flatten(2, 3)


def take_apart(rotate: Rotate, rotation: tuple[torch.Tensor, torch.Tensor], dim: int, dtype: torch.dtype) -> Turn:
    """Find Q, and the factors of the tokens, by asking `rotate` about keys of zeros and ones.

    Args:
        rotation: cos and sin of the tokens, as the model's own rotary embedding gives them.
        dim: dimensions of a head; those that are not rotated get a cos of 1 and a sin of 0.
        dtype: of what is returned.
    """
    cos, sin = rotation
    none, one = torch.zeros_like(cos[:1, :1]), torch.ones_like(cos[:1, :1])
    every = torch.eye(dim, dtype=cos.dtype, device=cos.device)[None, :, None]  # a head for each dimension
    quarter = (rotate(every, none, one) - rotate(every, none, none))[0, :, 0]
    ones = cos.new_ones(*cos.shape[:1], 1, cos.shape[1], dim)
    factors = rotate(ones, cos, torch.zeros_like(sin)), rotate(ones * quarter.sum(1), torch.zeros_like(cos), sin)
    both = torch.cat([every[0, :, 0], quarter.T], dim=1)
    places = both.abs().argmax(0)
    signs = both.gather(0, places[None])[0]
    return Turn(places, signs.to(dtype), torch.stack([part.mT.to(dtype) for part in factors], dim=2))


def can_take_apart(rotate: Rotate, rotation: tuple[torch.Tensor, torch.Tensor], dim: int) -> bool:
    """Whether a rotation has the form above: tried on random keys."""
    cos, sin = (part[:1].float() for part in rotation)
    generator = torch.Generator().manual_seed(0)
    keys, query = (torch.randn(1, 2, cos.shape[1], dim, generator=generator).to(cos.device) for _ in range(2))
    turn = take_apart(rotate, (cos, sin), dim, torch.float32)
    got = torch.einsum("bhtd,bhdt->bht", turn.turned(query), turn.applied(keys.mT))
    return torch.allclose(got, (query * rotate(keys, cos, sin)).sum(-1), rtol=1e-3, atol=1e-3)
