"""RoPE taken apart, so that a decode step rotates its one query and not every key.

Every rotation that transformers applies to a key k at position j has the form `k * cos_j + (k * sin_j) Q`, where Q
takes each pair of dimensions a quarter turn on: it moves each number to one other place, or that and its sign. The
score of a query q is then

    q . rotate_j(k) = [q, q Q^T] . [k * cos_j, k * sin_j]
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .cskv_factors import Scratch

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rotates keys [batch, heads, tokens, head_dim], given cos and sin [1 or batch, tokens, rotated dimensions]."""


class Turn(NamedTuple):
    """The rotation of some tokens.

    Attributes:
        places: [q, q Q^T] is q[places], but for its signs; [2 * head_dim].
        factors: cos and sin of the tokens as above, with the signs, [1 or batch, 1, 2, head_dim, tokens].
    """

    places: torch.Tensor
    factors: torch.Tensor

    def turned(self, query: torch.Tensor) -> torch.Tensor:
        """A query [..., head_dim] as keys that are `applied` meet it: [..., 2 * head_dim]."""
        return query.gather(-1, self.places.expand(*query.shape[:-1], -1))

    def applied(self, keys: torch.Tensor, start: int, scratch: Scratch) -> torch.Tensor:
        """Keys [batch, heads, head_dim, tokens] as a turned query meets them: [batch, heads, 2 * head_dim, tokens].

        The first of them is token `start` of those that this is the rotation of.
        """
        batch, heads, dim, tokens = keys.shape
        out = scratch.take("turned keys", (batch, heads, 2, dim, tokens), keys)
        return torch.mul(keys.unsqueeze(2), self.factors[..., start : start + tokens], out=out).flatten(2, 3)


class Form(NamedTuple):
    """How the rotation of a token is made of its cos and sin; the same for all tokens.

    Attributes:
        places, signs: [q, q Q^T] is q[places] * signs; [2 * head_dim] each.
        columns: which numbers of [cos, sin, 1, 0] the factors of `Turn` are, [2 * head_dim]; None: [cos, sin].
    """

    places: torch.Tensor
    signs: torch.Tensor
    columns: torch.Tensor | None

    def factors(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Those of tokens with cos and sin [1 or batch, tokens, width], as in `Turn`."""
        numbers = torch.cat([cos.mT, sin.mT], dim=1)
        if self.columns is not None:
            one = torch.ones_like(numbers[:, :1])
            numbers = torch.cat([numbers, one, 0 * one], dim=1).index_select(1, self.columns)
        return numbers.mul_(self.signs.unsqueeze(1)).unflatten(1, (1, 2, -1))


def find_form(rotate: Rotate, cos: torch.Tensor, dim: int) -> Form:
    """Find Q, and what becomes of cos and sin, by asking `rotate` about keys, cos and sin of zeros and ones.

    Args:
        cos: of any tokens, as the model's own rotary embedding gives it: for its width, dtype and device.
        dim: dimensions of a head; those that are not rotated get a cos of 1 and a sin of 0.
    """
    none, one, width = torch.zeros_like(cos[:1, :1]), torch.ones_like(cos[:1, :1]), cos.shape[-1]
    each = torch.eye(width, dtype=cos.dtype, device=cos.device)[None]  # a token for each number of cos
    every = torch.eye(dim, dtype=cos.dtype, device=cos.device)[None, :, None]  # a head for each dimension of a key
    quarter = (rotate(every, none, one) - rotate(every, none, none))[0, :, 0]
    both = torch.cat([every[0, :, 0], quarter.T], dim=1)
    places = both.abs().argmax(0)
    columns = []
    for i, key in enumerate((torch.ones_like(quarter[0]), quarter.sum(1))):
        fixed = rotate(key[None, None, None], none, none)[0, 0]
        keys, rotation = key.expand(1, 1, width, -1), (each, 0 * each) if i == 0 else (0 * each, each)
        moved = (rotate(keys, *rotation)[0, 0] - fixed).abs()
        constant = torch.where(fixed[0] == 1, 2 * width, 2 * width + 1)
        columns.append(torch.where(moved.any(0), moved.argmax(0) + i * width, constant))
    columns = torch.cat(columns)
    in_order = torch.equal(columns, torch.arange(2 * width, device=columns.device))
    return Form(places, both.gather(0, places[None])[0], None if in_order else columns)


def can_take_apart(rotate: Rotate, rotation: tuple[torch.Tensor, torch.Tensor], dim: int) -> bool:
    """Whether a rotation has the form above: tried on random keys."""
    cos, sin = (part[:1].float() for part in rotation)
    generator = torch.Generator().manual_seed(0)
    keys, query = (torch.randn(1, 2, cos.shape[1], dim, generator=generator).to(cos.device) for _ in range(2))
    form = find_form(rotate, cos, dim)
    turn = Turn(form.places, form.factors(cos, sin))
    got = torch.einsum("bhtd,bhdt->bht", turn.turned(query), turn.applied(keys.mT, 0, Scratch()))
    return torch.allclose(got, (query * rotate(keys, cos, sin)).sum(-1), rtol=1e-3, atol=1e-3)
