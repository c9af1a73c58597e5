"""B, which makes keys or values of latents: dense, or a block for each group of heads."""

import math

import torch
from torch import nn


class GroupedUp(nn.Module):
    """A linear layer whose matrix is block-diagonal, the zeros left out.

    The latents of a token are those of the first group of heads, then those of the second, and so on; each group's
    keys or values are made of its own, so that all of them cost 1 / `groups` of what they do with a dense matrix.

    Attributes:
        weight: [channels, rank / groups]; a block is the rows of its group, transposed.
        bias: [channels], or None.
    """

    def __init__(self, rank: int, channels: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(channels, rank // groups))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """[..., channels] from latents [..., rank]."""
        blocks = self.weight.unflatten(0, (self.groups, -1))
        made = torch.einsum("...gr,gcr->...gc", latents.unflatten(-1, (self.groups, -1)), blocks).flatten(-2)
        return made if self.bias is None else made + self.bias.to(made.dtype)


def up_projection(rank: int, channels: int, groups: int, bias: bool) -> nn.Module:
    """B for latents of `rank` channels."""
    return nn.Linear(rank, channels, bias) if groups == 1 else GroupedUp(rank, channels, groups, bias)


def made_of_tile(up: nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """`up(latents.mT).mT` of latents [batch, rank, tokens]: [batch, channels, tokens], which lie as the latents do."""
    weight, bias = up.weight.to(latents.dtype), up.bias
    batch, rank, groups = len(latents), latents.shape[1], latents.shape[1] // weight.shape[1]
    if groups == 1 and bias is None:
        return torch.bmm(weight.expand(batch, -1, -1), latents)
    blocks = weight.unflatten(0, (groups, -1)).expand(batch, -1, -1, -1).flatten(0, 1)
    latents = latents.unflatten(1, (groups, rank // groups)).flatten(0, 1)
    if bias is None:
        return torch.bmm(blocks, latents).unflatten(0, (batch, groups)).flatten(1, 2)
    bias = bias.to(latents.dtype).unflatten(0, (groups, -1)).expand(batch, -1, -1).flatten(0, 1).unsqueeze(-1)
    return torch.baddbmm(bias, blocks, latents).unflatten(0, (batch, groups)).flatten(1, 2)
