"""Uniform quantization of latents to 2, 3, 4 or 8 bits, packed into bytes.

A group of numbers that share a minimum and a step lies along the last dimension. Both are kept in 16 bits, rounded
outwards, so that every number of the group stays within half a (stored) step of its code.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

_CODES_PER_WORD = {2: (4, 1), 3: (8, 3), 4: (2, 1), 8: (1, 1)}  # bits: codes, and the bytes that hold just them

_SPREAD = {4: (torch.int16, (4,), 0x0F0F), 2: (torch.int32, (6, 12, 18), 0x03030303)}  # a byte's codes, a byte for each


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes below 2**bits: [..., n] becomes uint8 [..., ceil(n * bits / 8)], lowest bits first."""
    count, size = _CODES_PER_WORD[bits]
    wide = torch.int32 if size > 1 else torch.uint8
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count)).to(wide)
    words = padded[..., 0]
    for i in range(1, count):
        words = words | padded[..., i] << (bits * i)
    if size == 1:
        return words
    parts = torch.stack([words >> (8 * i) & 255 for i in range(size)], dim=-1).to(torch.uint8)
    return parts.flatten(-2)[..., : packed_bytes(codes.shape[-1], bits)].contiguous()


def unpack(packed: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 [..., bytes] becomes uint8 [..., length]."""
    if bits in _SPREAD:
        wide, shifts, mask = _SPREAD[bits]
        words = packed.to(wide, memory_format=torch.contiguous_format)
        spread = words | words << shifts[0]
        for shift in shifts[1:]:
            spread |= words << shift
        codes = spread.bitwise_and_(mask).view(torch.uint8)  # a byte for each code, since the lowest byte comes first
        return codes[..., :length]
    if bits == 8:
        return packed[..., :length]
    count, size = _CODES_PER_WORD[bits]
    parts = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % size)).unflatten(-1, (-1, size)).int()
    words = parts[..., 0]
    for i in range(1, size):
        words = words | parts[..., i] << (8 * i)
    codes = torch.stack([words >> (bits * i) & (2**bits - 1) for i in range(count)], dim=-1)
    return codes.to(torch.uint8).flatten(-2)[..., :length]


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)


def quantize(x: torch.Tensor, bits: int, clip: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (uint8, shape of x), minimum and step ([..., 1], bf16 for bf16 numbers and else fp16) of each group.

    The minimum is stored as a number, not as an integer zero point: a zero point that is clamped to the range of the
    codes destroys every group that lies on one side of zero.

    Args:
        x: [..., n], a group along the last dimension.
        clip: share of the range between smallest and largest number that the codes cover, around its middle.
    """
    stored = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float16
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if clip < 1:
        margin = (high - low) * ((1 - clip) / 2)
        low, high = low + margin, high - margin
    levels = 2**bits - 1
    minimum = -_round_up(-low, stored)
    step = _round_up((high - minimum.float()) / levels, stored)
    codes = (x - minimum.float()) / step.float().clamp(min=torch.finfo(torch.float32).tiny)
    return codes.round_().clamp_(0, levels).to(torch.uint8), minimum, step


def dequantize(codes: torch.Tensor, minimum: torch.Tensor, step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that the codes stand for, computed in fp32."""
    numbers = codes.float().mul_(step.float()).add_(minimum.float())  # torch.addcmul takes twice as long here
    if dtype == torch.float16:  # a step that was rounded up may lead beyond its range
        numbers = numbers.clamp(-65504, 65504)
    return numbers.to(dtype)


def _round_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The fp32 numbers in a 16-bit dtype, never below the number itself (but for the largest that dtype can hold)."""
    limits = torch.finfo(dtype)
    x = x.clamp(limits.min, limits.max)
    near = x.to(dtype)
    above = (x + x.abs() * limits.eps + limits.smallest_normal * limits.eps).clamp(max=limits.max).to(dtype)
    return torch.where(near.float() < x, above, near)


def product_by_group(weights: torch.Tensor, latents: torch.Tensor, groups: int) -> torch.Tensor:
    """Weights [batch, heads, tokens] times latents [batch, tokens, rank], of each head those of its group of heads.

    Returns:
        [batch, heads, rank / groups].
    """
    if groups == 1:
        return torch.bmm(weights, latents)
    pairs = zip(weights.chunk(groups, dim=1), latents.chunk(groups, dim=-1), strict=True)
    return torch.cat([ours @ theirs for ours, theirs in pairs], dim=1)


class Packed(NamedTuple):
    """Quantized latents of some tokens; every tensor has batch first, then tokens or groups of tokens."""

    codes: torch.Tensor
    minimum: torch.Tensor
    step: torch.Tensor


@dataclass(frozen=True)
class Quantizer:
    """How the latents of one layer, keys or values, become codes (the layout of KIVI, arXiv 2402.02750).

    Args:
        bits: 2, 3, 4 or 8.
        group: tokens in a group; quantization only ever takes whole groups.
        per_channel: one minimum and step for each channel and group (keys), or else for each token (values).
        clip: see `quantize`.
    """

    bits: int
    group: int
    per_channel: bool
    clip: float = 1.0

    def encode(self, latents: torch.Tensor, unread: torch.Tensor | int = 0) -> Packed:
        """Quantize [batch, n * group, rank].

        `unread` leading tokens of each row ([batch] or one number) are padding or sinks, whose latents nothing reads;
        they must not widen the range of those that share a group with them.
        """
        codes, minimum, step = quantize(self._grouped(latents, unread), self.bits, self.clip)
        return Packed(pack(codes, self.bits).contiguous(), minimum, step)

    def decode(self, packed: Packed, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """[batch, n * group, rank] as `encode` was given it, up to half a step."""
        codes = unpack(packed.codes, self.bits, self.group if self.per_channel else rank)
        return self._flat(dequantize(codes, packed.minimum, packed.step, dtype))

    def decode_tokens_last(self, packed: Packed, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """`decode`, but [batch, rank, n * group]."""
        if not self.per_channel:
            return self.decode(packed, rank, dtype).mT
        codes, minimum, step = (part.transpose(1, 2) for part in packed)
        codes = unpack(codes, self.bits, self.group)
        return dequantize(codes, minimum, step, dtype).flatten(2)

    def weighted_sum(self, packed: Packed, weights: torch.Tensor, rank: int, groups: int) -> torch.Tensor:
        """Sums of the first tokens' latents, where each token has its own minimum and step: they join its weight.

        Args:
            weights: [batch, heads, tokens].
            groups: of heads (see `GroupedUp`).

        Returns:
            [batch, heads, rank / groups] in the weights' dtype.
        """
        parts, count = [part.flatten(1, 2) for part in packed], weights.shape[-1]
        if parts[0].shape[1] > count:
            parts = [part[:, :count] for part in parts]
        codes, minimum, step = parts
        codes = unpack(codes, self.bits, rank).to(weights.dtype)
        sums = product_by_group(weights * step.mT, codes, groups)
        return sums.add_(torch.bmm(weights, minimum.to(weights.dtype)))

    def round_trip(self, latents: torch.Tensor, unread: torch.Tensor | int = 0) -> torch.Tensor:
        """`decode(encode(latents))` bit for bit, without packing, and with the gradient of the identity."""
        rounded = dequantize(*quantize(self._grouped(latents.detach(), unread), self.bits, self.clip), latents.dtype)
        return self._flat(rounded) + (latents - latents.detach())

    def _grouped(self, latents: torch.Tensor, unread: torch.Tensor | int) -> torch.Tensor:
        groups = latents.unflatten(1, (-1, self.group))
        index = torch.arange(latents.shape[1], device=latents.device)
        ignored = index < torch.as_tensor(unread, device=latents.device).reshape(-1, 1)
        ignored = ignored.unflatten(1, (-1, self.group)).unsqueeze(-1)
        groups = torch.where(ignored, groups[:, :, -1:], groups)
        return groups.transpose(2, 3) if self.per_channel else groups

    def _flat(self, groups: torch.Tensor) -> torch.Tensor:
        return (groups.transpose(2, 3) if self.per_channel else groups).flatten(1, 2)
