"""Factors of which each group of KV heads has its own: B is block-diagonal, and kept without its zeros.

`A` [hidden, rank] holds those of the groups side by side, `B` [rank / groups, channels] as well; with one group it is
dense. Keys and values then cost 1 / groups of what they would to rebuild, and each group has fewer latents to use.
"""

from collections.abc import Callable, Iterator

import torch

Factors = tuple[torch.Tensor, torch.Tensor]


def group_count(rank: int, b: torch.Tensor) -> int:
    """Groups that factors with `rank` latents have."""
    return rank // b.shape[0]


def parts(a: torch.Tensor, b: torch.Tensor) -> Iterator[Factors]:
    """A and B of each group; anything with latents last may stand in for A."""
    groups = group_count(a.shape[-1], b)
    return zip(a.chunk(groups, dim=-1), b.chunk(groups, dim=-1), strict=True)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ B` with B as a whole matrix: [..., channels] from [..., rank]."""
    return torch.cat([ours @ block for ours, block in parts(a, b)], dim=-1)


def factorized(method: Callable[[torch.Tensor, int], Factors], weight: torch.Tensor, rank: int, groups: int) -> Factors:
    """Factors of `weight` [hidden, channels], each group's channels by themselves; both must divide by `groups`."""
    made = [method(channels, rank // groups) for channels in weight.chunk(groups, dim=1)]
    return tuple(torch.cat(part, dim=1) for part in zip(*made, strict=True))
