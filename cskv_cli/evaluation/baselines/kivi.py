"""KIVI (arXiv 2402.02750): keys and values in codes of a few bits, the most recent ones exact; no rank is cut.

Keys are quantized per channel in groups of 32 tokens, once a group is full; values per token in groups of 32 channels,
once 32 newer ones are there. The quantizer and the packing are those of CSKV's own latents.
"""

import math
from typing import Any

import torch

from cskv_cli.evaluation.baselines.cache import BaselineLayer
from cskv_cli.modeling.cskv_latents import Latents
from cskv_cli.modeling.cskv_positions import Rows
from cskv_cli.modeling.cskv_quantizer import Quantizer

GROUP = RESIDUAL = 32


class _Values(Latents):
    """Packs a token once `RESIDUAL` newer ones are there."""

    @property
    def unpacked_groups(self) -> int:
        """Tokens that `settle` would pack."""
        return max(self._count - RESIDUAL, 0)


class KiviLayer(BaselineLayer):
    """Packed keys and values of one layer, the recent ones as they are.

    Attributes:
        packed_keys: [batch, tokens, heads * head_dim].
        packed_values: [batch * heads * groups of channels, tokens, channels in a group].
    """

    def __init__(self, bits: int, rows: Rows) -> None:
        super().__init__(rows)
        self.packed_keys = Latents(Quantizer(bits, GROUP, per_channel=True))
        self.packed_values = _Values(Quantizer(bits, 1, per_channel=False))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Add new tokens and return the keys and values of all, those that are packed as they can be read again."""
        heads, width = key_states.shape[1], value_states.shape[-1]
        group = math.gcd(width, GROUP)
        self.packed_keys.append(key_states.transpose(1, 2).flatten(2))
        self.packed_values.append(value_states.unflatten(-1, (-1, group)).transpose(2, 3).flatten(0, 2))
        self.tokens += key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        keys = self.packed_keys.first(self.tokens).unflatten(-1, (heads, -1)).transpose(1, 2)
        values = self.packed_values.first(self.tokens).unflatten(0, (-1, heads, width // group))
        return keys, values.transpose(2, 3).flatten(3)

    def settle(self, received: torch.Tensor | None) -> None:
        """Pack what is due."""
        self.packed_keys.settle(self.rows.read_exactly(0, self.device))
        self.packed_values.settle(torch.zeros(1, dtype=torch.long, device=self.device))


def token_bytes(bits: int, channels: int, head_dim: int) -> float:
    """What a token adds to a long cache of one layer: codes, and 16 bits each of minimum and step per group."""
    return channels * (2 * bits / 8 + 4 / GROUP + 4 / math.gcd(head_dim, GROUP))


def cache_bytes(bits: int, channels: int, head_dim: int, tokens: int) -> int:
    """What the cache of one layer holds in 16 bits: codes, and the recent keys and values as they are."""
    keys, values = tokens // GROUP * GROUP, max(tokens - RESIDUAL, 0)
    packed = keys * channels * (bits / 8 + 4 / GROUP) + values * channels * (bits / 8 + 4 / math.gcd(head_dim, GROUP))
    return round(packed) + 2 * channels * (2 * tokens - keys - values)
