"""Bytes of a KV cache, by formula; `tests/test_memory.py` holds the formula against real caches."""

from dataclasses import dataclass

from cskv_cli.layout import Layout

POSITION_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """What a base model caches for a token in one layer.

    Attributes:
        channels: key channels, and as many value channels.
        dtype_bytes: bytes of one number.
        heads: of keys, and as many of values.
        copies: how often each of them is cached.
    """

    channels: int
    dtype_bytes: int
    heads: int = 1
    copies: int = 1

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in one uncompressed layer."""
        return 2 * self.channels * self.copies * self.dtype_bytes


def base_bytes(shape: Shape, layout: Layout, tokens: int) -> int:
    """The base model's cache in the layers that CSKV could compress."""
    return (len(layout.layers) + len(layout.whole)) * tokens * shape.token_bytes


def cache_bytes(shape: Shape, layout: Layout, tokens: int) -> int:
    """The cache in the same layers after `tokens` tokens of one sequence, for rotary models of constant frequency.

    Latents of all tokens (the full groups as codes with minimum and step), exact keys and values of the window and the
    sinks, and one position per token for the whole model.
    """
    total = tokens * POSITION_BYTES + len(layout.whole) * tokens * shape.token_bytes
    for i in layout.layers:
        for name in "kv":
            rank, bits = (getattr(layout, f"{what}_{name}")[i] for what in ("rank", "bits"))
            total += latent_bytes(shape, name, rank, bits, layout.group, tokens)
        total += (min(tokens, layout.window) + min(tokens, layout.sinks)) * shape.token_bytes
    return total


def bytes_per_token(shape: Shape, layout: Layout) -> float:
    """What one more token adds to a long CSKV cache."""
    span = 64 * (layout.group or 1)
    return (cache_bytes(shape, layout, 3 * span) - cache_bytes(shape, layout, 2 * span)) / span


def latent_bytes(shape: Shape, name: str, rank: int, bits: int | None, group: int | None, tokens: int) -> int:
    """The latents of the keys ("k") or values ("v") of one layer after `tokens` tokens."""
    if bits is None:
        return tokens * rank * shape.dtype_bytes
    groups, rest = divmod(tokens, group)
    packed = lambda count: -(-count * bits // 8)  # noqa: E731
    if name == "k":
        group_bytes = rank * (packed(group) + 4)  # minimum and step of each channel
    else:
        group_bytes = group * (packed(rank) + 4)  # minimum and step of each token
    return groups * group_bytes + rest * rank * shape.dtype_bytes
