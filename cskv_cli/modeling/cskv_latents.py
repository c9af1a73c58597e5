"""The compressed history of one layer: the latents of its keys, or of its values, quantized or not."""

from collections.abc import Callable

import torch

from .cskv_quantizer import Packed, Quantizer


class Latents:
    """Latents of all cached tokens, [batch, tokens, rank], in the order in which they came.

    With a quantizer, `settle` packs the groups of tokens that are full; the tokens after them stay as they are.
    """

    def __init__(self, quantizer: Quantizer | None = None) -> None:
        self.quantizer = quantizer
        self.packed: Packed | None = None
        self.recent: torch.Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.recent is None else self.quantized_tokens + self.recent.shape[1]

    @property
    def quantized_tokens(self) -> int:
        """Tokens that are held as codes."""
        if self.packed is None:
            return 0
        return self.packed.minimum.shape[1] * self.quantizer.group

    def append(self, latents: torch.Tensor) -> None:
        """Add the latents of new tokens, [batch, new, rank]."""
        self.recent = latents if self.recent is None else torch.cat([self.recent, latents], dim=1)

    def settle(self, unread: torch.Tensor) -> None:
        """Pack the full groups; `unread` [batch] counts each row's leading tokens that nothing reads (see encode)."""
        if self.quantizer is None:
            return
        full = self.recent.shape[1] // self.quantizer.group * self.quantizer.group
        if not full:
            return
        new = self.quantizer.encode(self.recent[:, :full], unread - self.quantized_tokens)
        old = self.packed or (None,) * len(new)
        self.packed = Packed(*(b if a is None else torch.cat([a, b], dim=1) for a, b in zip(old, new, strict=True)))
        self.recent = self.recent[:, full:].clone()

    def first(self, length: int) -> torch.Tensor:
        """The latents of the first `length` tokens, dequantized: [batch, length, rank]."""
        if self.packed is None:
            return self.recent[:, :length]
        groups = -(-min(length, self.quantized_tokens) // self.quantizer.group)
        codes = Packed(*(part[:, :groups] for part in self.packed))
        old = self.quantizer.decode(codes, self.recent.shape[-1], self.recent.dtype)[:, :length]
        if length <= self.quantized_tokens:
            return old
        return torch.cat([old, self.recent[:, : length - self.quantized_tokens]], dim=1)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, where `check_crop` allows it."""
        if length < self.quantized_tokens:
            self.packed = Packed(*(part[:, : length // self.quantizer.group].clone() for part in self.packed))
        self.recent = self.recent[:, : length - self.quantized_tokens].clone()

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
        self.recent = fn(self.recent)
        if self.packed is not None:
            self.packed = Packed(*map(fn, self.packed))
