"""B, which makes keys or values of latents: dense, or a block for each group of heads."""

import math

import torch
from torch import nn

SMALL = 2**17  # numbers in a matrix


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


def made_of_token(downs: tuple[nn.Module, ...], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`down(hidden)` of one token [batch, 1, hidden] for each of `downs`.

    A CPU takes longer to begin a product in 16 bits than to bring a small matrix to 32.
    """
    if hidden.device.type != "cpu" or hidden.dtype.itemsize != 2:
        return tuple(down(hidden) for down in downs)
    made, wide = [], hidden.float()
    for down in downs:
        weight = down.weight if is_bare(down) else None
        if weight is None or weight.numel() > SMALL:
            made.append(down(hidden))
        else:
            made.append(nn.functional.linear(wide, weight.float()).to(hidden.dtype))
    return tuple(made)


class Scratch:
    """Memory that the layers of one forward write to in turn: a CPU takes longer to get new pages than to fill them."""

    def __init__(self) -> None:
        self.end()

    def take(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor | None:
        """What an operation writes to, over what `name` gave before; None, for a new tensor, where that is as good."""
        if like.device.type != "cpu":
            return None
        held, size = self._held.get(name), math.prod(shape)
        if held is None or held.numel() < size or held.dtype != like.dtype:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(shape)

    def end(self) -> None:
        """After a forward: give it back."""
        self._held: dict[str, torch.Tensor] = {}


def made_of_tile(up: nn.Module, latents: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """`up(latents.mT).mT` of latents [batch, rank, tokens]: [batch, channels, tokens], which lie as the latents do."""
    weight, bias = up.weight.to(latents.dtype), up.bias
    batch, rank, tokens = latents.shape
    groups = rank // weight.shape[1]
    blocks = weight.view(1, groups, -1, weight.shape[1]).expand(batch, -1, -1, -1).flatten(0, 1)
    latents = latents.reshape(batch * groups, -1, tokens)
    out = scratch.take("keys", (*blocks.shape[:2], tokens), latents)
    if bias is None:
        made = torch.bmm(blocks, latents, out=out)
    else:
        bias = bias.to(latents.dtype).view(1, groups, -1).expand(batch, -1, -1).flatten(0, 1).unsqueeze(-1)
        made = torch.baddbmm(bias, blocks, latents, out=out)
    return made.view(batch, -1, tokens)
