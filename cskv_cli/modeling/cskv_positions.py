"""What a cache remembers of its tokens beside keys and values: how they were rotated, and where rows begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .cskv_latents import whole_blocks
from .cskv_rotation import Form, Turn
from .cskv_structure import takes

CPU_CHUNK = 1024  # tokens whose rotation is taken apart at once, so that what comes between is small

TensorMap = Callable[[torch.Tensor], torch.Tensor]


class RotaryHistory:
    """What the rotation (RoPE) of every cached token can be repeated from; layers with the same RoPE share one.

    That is a token's position, 4 bytes, where the model's rotary embedding gives the same cos and sin for it whenever
    it is asked. Where it does not (frequencies that change with the length), cos and sin themselves are kept.
    """

    NAMES = "positions", "cos", "sin"  # of the tensors held

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self._rebuilt: tuple[torch.Tensor, torch.Tensor] | None = None
        self._turn: Turn | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.positions: torch.Tensor | None = None  # [1 or batch, tokens]
        self.cos: torch.Tensor | None = None  # [1 or batch, tokens, rotated dimensions]
        self.sin: torch.Tensor | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Borrow the model's rotary embedding for one forward."""
        self.end()
        self._rotary = getattr(model, "rotary_emb", None)

    def end(self) -> None:
        """Give it back, and drop what was rebuilt for this forward."""
        self._rotary = self._rebuilt = self._turn = None

    def __len__(self) -> int:
        held = self.cos if self.positions is None else self.positions
        return 0 if held is None else held.shape[1]

    def extend(self, past: int, positions: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Add the tokens of this forward; the first layer does, the others find them there."""
        if past == 0 and len(self) != cos.shape[1]:
            self.reset()
        if len(self) != past:
            return
        if past == 0 and self._repeatable(positions, cos, sin):
            self.positions = positions.to(torch.int32)
        elif past == 0:
            self.cos, self.sin = cos, sin
        elif self.positions is not None:
            self.positions = _append_rows(self.positions, positions.to(torch.int32))
        else:
            self.cos, self.sin = _append_rows(self.cos, cos), _append_rows(self.sin, sin)

    def first(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the first `length` tokens, on the device and in the dtype of `like`."""
        if self._rebuilt is None:  # the same for all layers
            self._rebuilt = self._some(0, length, like)
        return tuple(part.to(like.device) for part in self._rebuilt)

    def turn(self, length: int, form_of: Callable[[torch.Tensor], Form], like: torch.Tensor) -> Turn:
        """The rotation of the first `length` tokens, taken apart once for all layers (see `Turn`).

        Zeros follow, up to a whole block. On the device and in the dtype of `like`.

        Args:
            form_of: the form of a layer's rotation, given cos.
        """
        if self._turn is None:
            self._turn = self._take_apart(length, form_of, like)
        if self._turn.factors.device == like.device:
            return self._turn
        return Turn(*(part.to(like.device) for part in self._turn))

    def _take_apart(self, length: int, form_of: Callable[[torch.Tensor], Form], like: torch.Tensor) -> Turn:
        chunk, factors = CPU_CHUNK if like.device.type == "cpu" else length, None
        for start in range(0, length, chunk):
            cos, sin = self._some(start, min(start + chunk, length), like)
            form = form_of(cos)
            part = form.factors(cos, sin)
            if factors is None:
                factors = like.new_zeros(*part.shape[:-1], whole_blocks(length))
            factors[..., start : start + part.shape[-1]] = part
        return Turn(form.places, factors)

    def _some(self, start: int, stop: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.positions is not None:
            return self._compute(self.positions[:, start:stop], like)
        return self.cos[:, start:stop].to(like.device), self.sin[:, start:stop].to(like.device)

    def apply(self, fn: TensorMap) -> None:
        """Replace every tensor held by `fn` of it."""
        for name in self.NAMES:
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, fn(tensor))

    def _compute(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kind = [self.kind] if takes(self._rotary, "layer_type") else []
        return self._rotary(like, positions.to(like.device, torch.long), *kind)

    def _repeatable(self, positions: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        if positions is None or positions.dim() != 2 or self._rotary is None:
            return False
        rope_type = getattr(self._rotary, "rope_type", None)
        if isinstance(rope_type, dict):
            rope_type = rope_type.get(self.kind)
        if rope_type is None or "dynamic" in rope_type or rope_type == "longrope":
            return False
        return all(map(torch.equal, self._compute(positions, cos), (cos, sin)))


def _append_rows(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    rows = max(len(old), len(new))  # a single row stands for the whole batch
    return torch.cat([t.to(old.device).expand(rows, *t.shape[1:]) for t in (old, new)], dim=1)


class Places(NamedTuple):
    """Which tokens a decode step reads.

    Attributes:
        sinks: how many it reads exactly.
        old: tokens before the window.
        total: tokens in the cache.
        width: old tokens whose scores are made, the last of which may be no token.
        oldest: see `CSKVLayer.oldest`.
    """

    sinks: int
    old: int
    total: int
    width: int
    oldest: int


class Rows:
    """Where each row of the batch begins: the index of its first token that is not padding."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.starts: torch.Tensor | None = None  # [batch]; None: no row is padded
        self.end()

    def see(self, attention_mask: torch.Tensor | dict[str, torch.Tensor] | None) -> None:
        """Read it off a mask over all tokens so far: [batch, tokens], or [batch, 1, new, tokens] for attention."""
        self.end()
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask.get("full_attention")
        if not torch.is_tensor(attention_mask):
            return
        if attention_mask.dim() == 4:
            attention_mask = attention_mask[:, 0, -1]
            if attention_mask.is_floating_point():
                attention_mask = attention_mask == 0
        seen = attention_mask.bool()
        self.starts = torch.where(seen.any(-1), seen.int().argmax(-1), seen.shape[-1])

    def read_exactly(self, sinks: int, device: torch.device) -> torch.Tensor:
        """[batch or 1]: how many leading tokens of each row are padding or sinks."""
        starts = torch.zeros(1, dtype=torch.long) if self.starts is None else self.starts
        return starts.to(device) + sinks

    def bounds(self) -> tuple[int, int]:
        """The first and the last place where a row begins."""
        if self._bounds is None:
            self._bounds = (0, 0) if self.starts is None else tuple(torch.stack(self.starts.aminmax()).tolist())
        return self._bounds

    def bias(self, mask: torch.Tensor | None, places: Places, device: torch.device) -> torch.Tensor:
        """What a decode step adds to its scores of sinks, window and old tokens (in this order), once for all layers.

        A sink is read exactly, and so not once more among the old tokens.

        Args:
            mask: [batch, total] or [batch, 1, 1, total], boolean or to be added; None: all tokens are seen.

        Returns:
            [1 or batch, 1, sinks + total - old + width] in float32.
        """
        kind = places, device
        if self._biases is None or self._biases[0] is not mask:
            self._biases = mask, {}
        if kind not in self._biases[1]:
            self._biases[1][kind] = self._make_bias(mask, places, device)
        return self._biases[1][kind]

    def _make_bias(self, mask: torch.Tensor | None, places: Places, device: torch.device) -> torch.Tensor:
        sinks, old, total, width, oldest = places
        seen = torch.zeros(1, total, device=device) if mask is None else _added(mask.flatten(1)).to(device)
        place = self.read_exactly(sinks, device).unsqueeze(1) + torch.arange(-sinks, 0, device=device)
        batch = max(len(seen), len(place))
        seen, place = seen.expand(batch, -1), place.expand(batch, -1)
        others = seen.scatter(1, place, -torch.inf)[:, :old], seen.new_full((batch, width - old), -torch.inf)
        return torch.cat([seen.gather(1, place), seen[:, old:].roll(oldest, 1), *others], dim=1).unsqueeze(1)

    def end(self) -> None:
        """After a forward: drop what was made for it."""
        self._bounds: tuple[int, int] | None = None
        self._biases: tuple | None = None  # a mask, and what is made of it

    def apply(self, fn: TensorMap) -> None:
        """Replace the starts by `fn` of them."""
        self.end()
        if self.starts is not None:
            self.starts = fn(self.starts)


def _added(mask: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to scores, in float32."""
    if mask.is_floating_point():
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask.bool(), -torch.inf)
