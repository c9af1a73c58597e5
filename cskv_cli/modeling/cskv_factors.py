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


def is_bare(linear: nn.Module) -> bool:
    """Whether its weight may be read without a call: no adapter (PEFT), no hook, of which one may bring it."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "_hf_hook" in vars(linear)
    return type(linear) in (nn.Linear, GroupedUp) and not hooked


class Scratch:
    """Memory that the layers of one forward write to in turn: a CPU takes longer to get new pages than to fill them."""

    def __init__(self) -> None:
        self.end()

    def take(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor | None:
        """What an operation writes to, over what `name` gave before; None, for a new tensor, where that is as good."""
        if like.device.type != "cpu":
            return None
        key = shape, like.dtype
        views = self._held.setdefault(name, {})
        if key not in views:
            size = math.prod(shape)
            large = next((view for view in views.values() if view.dtype == like.dtype and view.numel() >= size), None)
            if large is None:
                views.clear()
                large = like.new_empty(size)
            views[key] = large.flatten()[:size].view(shape)
        return views[key]

    def end(self) -> None:
        """After a forward: give it back."""
        self._held: dict[str, dict[tuple, torch.Tensor]] = {}  # by name, then by shape and dtype, all the same memory


def by_block(part: torch.Tensor, batch: int, blocks: int) -> torch.Tensor:
    """A weight or bias [channels, ...] cut into equal blocks, for each row of a batch: [blocks, channels of one, ...].

    Args:
        blocks: of all rows together.
    """
    rows = part if batch == 1 else part.expand(batch, *part.shape)
    return rows.reshape(blocks, -1, *part.shape[1:])


def made_of_tile(up: nn.Module, latents: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """`up(latents.mT).mT` of latents [batch, rank, tokens]: [batch, channels, tokens], which lie as the latents do."""
    weight, (batch, rank, tokens) = up.weight.to(latents.dtype), latents.shape
    blocks = batch * rank // weight.shape[1]
    matrices = by_block(weight, batch, blocks)
    latents = latents.reshape(blocks, -1, tokens)
    out = scratch.take("keys", (*matrices.shape[:2], tokens), latents)
    if up.bias is None:
        made = torch.bmm(matrices, latents, out=out)
    else:
        bias = by_block(up.bias.to(latents.dtype), batch, blocks).unsqueeze(-1)
        made = torch.baddbmm(bias, matrices, latents, out=out)
    return made.view(batch, -1, tokens)
