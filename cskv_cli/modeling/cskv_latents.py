"""The compressed history of one layer: the latents of its keys, or of its values, quantized or not."""

import functools
from collections.abc import Callable

import torch

from .cskv_quantizer import Packed, Quantizer, product_by_group

BLOCK = 64  # tokens of room that an append makes when there is none


class Latents:
    """Latents of all cached tokens, [batch, tokens, rank], in the order in which they came.

    With a quantizer, `settle` packs the groups of tokens that are full; the tokens after them stay as they are. Room
    for more is made a block at a time (of a group, with a quantizer), so that a new token moves no old one.

    Args:
        tokens_last: keep each channel's tokens side by side in memory, as rebuilding keys likes it.
    """

    def __init__(self, quantizer: Quantizer | None = None, tokens_last: bool = False) -> None:
        self.quantizer, self.tokens_last = quantizer, tokens_last
        self.packed: Packed | None = None
        self._room: torch.Tensor | None = None  # [batch, capacity, rank], or [batch, rank, capacity]
        self._count = 0

    @property
    def recent(self) -> torch.Tensor | None:
        """The latents that are not packed, [batch, tokens, rank]."""
        return None if self._room is None else self._tokens_first()[:, : self._count]

    def __len__(self) -> int:
        return self.quantized_tokens + self._count

    @property
    def rank(self) -> int:
        """Channels of a latent."""
        return self._room.shape[1 if self.tokens_last else 2]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the latents, and of what codes are dequantized to."""
        return self._room.dtype

    @property
    def quantized_tokens(self) -> int:
        """Tokens that are held as codes."""
        if self.packed is None:
            return 0
        return self.packed.minimum.shape[1] * self.quantizer.group

    @property
    def capacity(self) -> int:
        """Tokens that `tile` and `weighted_sum` know: those that are packed, or all and the room (zeros) after them."""
        return self._room.shape[2 if self.tokens_last else 1] if self.packed is None else self.quantized_tokens

    def append(self, latents: torch.Tensor) -> None:
        """Add the latents of new tokens, [batch, new, rank]."""
        start, stop = self._count, self._count + latents.shape[1]
        if self._room is None:
            self._hold(latents)
        elif latents.requires_grad or self._room.requires_grad:
            self._hold(torch.cat([self.recent, latents], dim=1))
        else:
            if stop > self._tokens_first().shape[1] or frozen(self._room):
                self._grow(stop)
            self._tokens_first()[:, start:stop] = latents
            self._count = stop

    def settle(self, unread: torch.Tensor) -> None:
        """Pack the full groups; `unread` [batch] counts each row's leading tokens that nothing reads (see encode)."""
        if not (full := self.unpacked_groups):
            return
        full *= self.quantizer.group
        new = self.quantizer.encode(self.recent[:, :full], unread - self.quantized_tokens)
        old = self.packed or (None,) * len(new)
        self.packed = Packed(*(b if a is None else torch.cat([a, b], dim=1) for a, b in zip(old, new, strict=True)))
        self._hold(self.recent[:, full:].clone())

    @property
    def unpacked_groups(self) -> int:
        """Full groups of tokens that `settle` would pack."""
        return 0 if self.quantizer is None else self._count // self.quantizer.group

    def first(self, length: int) -> torch.Tensor:
        """The latents of the first `length` tokens, dequantized: [batch, length, rank]."""
        if self.packed is None:
            return self.recent[:, :length]
        old = self._decoded(0, min(length, self.quantized_tokens))
        if length <= self.quantized_tokens:
            return old
        return torch.cat([old, self.recent[:, : length - self.quantized_tokens]], dim=1)

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """The latents of some of the first `capacity` tokens, dequantized, tokens last: [batch, rank, stop - start].

        With a quantizer, all of them must be packed, and `start` the beginning of a group.
        """
        if self.packed is None:
            return self._room[..., start:stop] if self.tokens_last else self._room[:, start:stop].mT
        codes = self._codes(start, stop)
        return self.quantizer.decode_tokens_last(codes, self.rank, self._room.dtype)[..., : stop - start]

    def weighted_sum(self, weights: torch.Tensor, groups: int, tile: int) -> torch.Tensor:
        """Sum of the first tokens' latents with weights [batch, heads, tokens], which are at most `capacity`.

        Codes are unpacked for `tile` tokens (whole groups) at a time.

        Args:
            groups: of heads, each of which has its own share of the channels (see `GroupedUp`).

        Returns:
            [batch, heads, rank / groups], computed in the dtype of the weights.
        """
        count = weights.shape[-1]
        if self.packed is None:
            return product_by_group(weights, self._tokens_first()[:, :count].to(weights.dtype), groups)
        sums = []
        for start in range(0, count, tile):
            stop = min(start + tile, count)
            codes = self._codes(start, stop)
            sums.append(self.quantizer.weighted_sum(codes, weights[..., start:stop], self.rank, groups))
        return functools.reduce(torch.add, sums)

    def as_it_is(self) -> "Latents":
        """Another one over the same tensors, which stays as it is when this one is changed by `apply` or `settle`."""
        twin = object.__new__(Latents)
        vars(twin).update(vars(self))
        return twin

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, where `check_crop` allows it."""
        if length < self.quantized_tokens:
            self.packed = Packed(*(part[:, : length // self.quantizer.group].clone() for part in self.packed))
        self._hold(self.recent[:, : length - self.quantized_tokens].clone())

    def check_crop(self, length: int) -> None:
        """Make sure that `crop` can keep just the first `length` tokens.

        Raises:
            ValueError: `length` lies inside a packed group, of which the exact latents are gone.
        """
        if length >= self.quantized_tokens or length % self.quantizer.group == 0:
            return
        group = self.quantizer.group
        raise ValueError(
            f"cannot crop this quantized cache to {length} tokens: it is packed in groups of {group} tokens. "
            f"Crop to {length - length % group}, or call `activate_past_recording` before the tokens are added."
        )

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor held, all of them [batch, ...], by `fn` of it."""
        self._room = fn(self._room)
        if self.packed is not None:
            self.packed = Packed(*map(fn, self.packed))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is held, without the room for more."""
        held = {} if self._room is None else {"recent": self.recent}
        return held if self.packed is None else held | self.packed._asdict()

    def restore(self, recent: torch.Tensor, **packed: torch.Tensor) -> None:
        """Hold what `tensors` gave."""
        self._hold(recent)
        self.packed = Packed(**packed) if packed else None

    def _tokens_first(self) -> torch.Tensor:
        return self._room.mT if self.tokens_last else self._room

    def _hold(self, latents: torch.Tensor) -> None:
        self._room = (latents.mT if self.tokens_last else latents).contiguous()
        self._count = latents.shape[1]

    def _grow(self, length: int) -> None:
        block = BLOCK if self.quantizer is None else self.quantizer.group
        batch, _, rank = self._tokens_first().shape
        capacity, old = whole_blocks(length, block), self.recent
        self._room = self._room.new_zeros((batch, rank, capacity) if self.tokens_last else (batch, capacity, rank))
        self._tokens_first()[:, : self._count] = old

    def _codes(self, start: int, stop: int) -> Packed:
        if start == 0 and stop == self.quantized_tokens:
            return self.packed
        group = self.quantizer.group
        return Packed(*(part[:, start // group : -(-stop // group)] for part in self.packed))

    def _decoded(self, start: int, stop: int) -> torch.Tensor:
        codes = self._codes(start, stop)
        return self.quantizer.decode(codes, self.rank, self._room.dtype)[:, : stop - start]


def whole_blocks(tokens: int, block: int = BLOCK) -> int:
    """So many tokens, and what is missing to the end of their last block."""
    return -(-tokens // block) * block


def frozen(tensor: torch.Tensor) -> bool:
    """Whether it was made in inference mode, and this is not: then it cannot be written to."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()
