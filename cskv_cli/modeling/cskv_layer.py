"""The cache of one compressed layer: exact keys and values where attention looks most, latents elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .cskv_factors import Scratch
from .cskv_latents import Latents
from .cskv_positions import RotaryHistory, Rows, TensorMap

if TYPE_CHECKING:
    from .cskv_attention import CSKVAttention
    from .cskv_decode import DecodeStep


class CSKVLayer(CacheLayerMixin):
    """The cache of one compressed layer.

    Attributes:
        keys, values: exact, [batch, heads, at most window, head_dim], of the last tokens (more while past is recorded).
        sink_keys, sink_values: exact, [batch, heads, sinks, head_dim].
        latents: of the keys and of the values, for all tokens.
    """

    is_sliding, is_croppable, is_compileable, supports_early_init = False, True, False, False

    def __init__(
        self, window: int, sinks: int, quantizers: tuple, rows: Rows, rotary: RotaryHistory, scratch: Scratch
    ) -> None:
        super().__init__()
        self.window, self.sinks, self.rows, self.rotary, self.scratch = window, sinks, rows, rotary, scratch
        self.quantizers = quantizers
        self.record_past = False
        self.whole = False  # whether someone wants to see the attention weights, so that all keys must be there
        self._staged: tuple | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = self.sink_keys = self.sink_values = None
        self.latents = Latents(self.quantizers[0], tokens_last=True), Latents(self.quantizers[1])
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember where the cache lives."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def stage(
        self, attention: CSKVAttention, latents: tuple, kwargs: dict[str, Any], step: DecodeStep | None = None
    ) -> None:
        """Take what `update` needs beyond its arguments; the attention layer hands it over just before.

        With a `step`, `update` gives it the history, and returns only what is exact.
        """
        self._staged = attention, latents, kwargs.get("position_ids"), kwargs.get("position_embeddings"), step

    def unstage(self) -> None:
        """Let go of what a forward staged and, because it failed, did not use."""
        self._staged = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Add new tokens and return the keys and values of all, [batch, heads, tokens, head_dim].

        Exact are the new tokens, the window that ends at the first of them, and the sinks; the others are rebuilt.

        Raises:
            ValueError: nothing was staged: the model is not the one that this cache is for.
        """
        if self._staged is None:
            raise ValueError("a CSKVCache needs its own model, which is loaded with trust_remote_code=True")
        (attention, latents, positions, rotation, step), self._staged = self._staged, None
        past = self.get_seq_length()
        if rotation is not None:
            self.rotary.extend(past, positions, *rotation)
        if step is not None:
            return self._add_one(key_states, value_states, latents, step)
        if past:
            left = 0 if self.record_past else max(self.keys.shape[2] - self.window + 1, 0)  # by the first new token
            self.keys = torch.cat([self.keys[:, :, left:], key_states], dim=2)
            self.values = torch.cat([self.values[:, :, left:], value_states], dim=2)
        else:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        keys, values = self._all(attention, past + key_states.shape[2], rotation is not None)
        self._place_sinks(keys, values, past)
        for store, new in zip(self.latents, latents, strict=True):
            store.append(new)
        if not self.record_past:
            self._settle()
        return keys, values

    def decodes(self) -> bool:
        """Whether the next token, if it comes alone, can be a `DecodeStep`: all sinks have left the window."""
        if self.whole or self.record_past or not self.is_initialized:
            return False
        keys, values = self.latents
        old = len(keys) + 1 - min(self.keys.shape[2] + 1, self.window)
        packed = min(old if store.quantizer is None else store.quantized_tokens for store in (keys, values))
        return packed >= old > self.rows.bounds()[1] + self.sinks

    def _add_one(self, key: torch.Tensor, value: torch.Tensor, latents: tuple, step: DecodeStep) -> tuple:
        """Add a token; its `step` reads the others. Returns the exact keys and values: sinks, then the window."""
        for store, new in zip(self.latents, latents, strict=True):
            store.append(new)
        left = max(self.keys.shape[2] - self.window + 1, 0)
        keys, values = [self.keys[:, :, left:], key], [self.values[:, :, left:], value]
        if self.sinks:
            keys, values = [self.sink_keys, *keys], [self.sink_values, *values]
        keys, values = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        self.sink_keys, self.keys = keys[:, :, : self.sinks], keys[:, :, self.sinks :]
        self.sink_values, self.values = values[:, :, : self.sinks], values[:, :, self.sinks :]
        step.read(self, self.get_seq_length() - self.keys.shape[2])
        self._pack()
        return keys, values

    def _all(self, attention: CSKVAttention, total: int, rotates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if not (old := total - self.keys.shape[2]):
            return self.keys, self.values
        rotation = self.rotary.first(old, self.keys) if rotates else None
        latent_keys, latent_values = (store.first(old) for store in self.latents)
        keys = attention.rebuild_keys(latent_keys, rotation), self.keys
        values = attention.rebuild_values(latent_values), self.values
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def _place_sinks(self, keys: torch.Tensor, values: torch.Tensor, past: int) -> None:
        """Keep the sinks that are new, and put all of them where `keys` and `values` have rebuilt ones."""
        if not self.sinks:
            return
        last = self.rows.read_exactly(self.sinks, keys.device).unsqueeze(1)
        place = last + torch.arange(-self.sinks, 0, device=keys.device)
        place = place.clamp(max=keys.shape[2] - 1)[:, None, :, None]  # a sink to come is the last token for now
        held, rebuilt = [], keys.shape[2] - self.keys.shape[2]
        for exact, sinks in ((self.keys, self.sink_keys), (self.values, self.sink_values)):
            index = (place - rebuilt).clamp(min=0).expand(*exact.shape[:2], -1, exact.shape[3])
            new = exact.gather(2, index)
            held.append(new if sinks is None else torch.where(place < past, sinks, new))
        self.sink_keys, self.sink_values = held
        if rebuilt:
            for states, sinks in zip((keys, values), held, strict=True):
                states.scatter_(2, place.expand_as(sinks), sinks)

    def _settle(self, removed: int = 0) -> None:
        """Let go of the exact keys and values outside the window, and pack the latents that fill a group.

        `removed` tokens are gone from the end of the cache, but not yet from the exact keys and values.
        """
        stop = max(self.keys.shape[2] - removed, 0)
        start = max(stop - self.window, 0)
        if start or removed:  # a copy: a view would keep them all alive
            self.keys, self.values = self.keys[:, :, start:stop].clone(), self.values[:, :, start:stop].clone()
            if self.sinks:  # which a `DecodeStep` leaves in one tensor with the window
                self.sink_keys, self.sink_values = self.sink_keys.clone(), self.sink_values.clone()
        self._pack()

    def _pack(self) -> None:
        if any(store.unpacked_groups for store in self.latents):
            for store in self.latents:
                store.settle(self.rows.read_exactly(self.sinks, self.keys.device))

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return len(self.latents[0])

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4.x and early 5.x

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Tokens that attention will see, and the index of the first."""
        if torch.is_tensor(query_length):  # transformers 4.x and early 5.x pass `cache_position`
            query_length = len(query_length)
        return self.get_seq_length() + query_length, 0

    def activate_past_recording(self) -> None:
        """Keep the exact keys, values and latents of all tokens that come, until `crop` is called."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (0 or negative; transformers 4.x and early 5.x: the length to keep).

        Tokens of the window that were given up before stay rebuilt from their latents.

        Raises:
            ValueError: the cut goes through a packed group (see `Latents.crop`).
        """
        if not self.is_initialized:
            return
        past, length = self.get_seq_length(), self.check_crop(tokens_to_remove)
        if not length:
            self.reset()
            return
        if length < past:
            for store in self.latents:
                store.crop(length)
        self._settle(removed=past - length)

    def check_crop(self, tokens_to_remove: int) -> int:
        """The tokens that `crop` would leave, or the ValueError that it would raise."""
        past = self.get_seq_length()
        length = tokens_kept(past, tokens_to_remove)
        for store in self.latents:
            store.check_crop(length)
        return length

    def apply(self, fn: TensorMap) -> None:
        """Replace every tensor of this layer, all of them [batch, ...], by `fn` of it."""
        if not self.is_initialized:
            return
        self.keys, self.values = fn(self.keys), fn(self.values)
        if self.sink_keys is not None:
            self.sink_keys, self.sink_values = fn(self.sink_keys), fn(self.sink_values)
        for store in self.latents:
            store.apply(fn)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take the rows of the beams that go on."""
        self.apply(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.apply(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        self.apply(lambda t: t[indices])

    def offload(self) -> None:
        """Move to the CPU until `prefetch`."""
        self.apply(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move back."""
        self.apply(lambda t: t.to(self.device, non_blocking=True))


def tokens_kept(past: int, tokens_to_remove: int) -> int:
    """Tokens that a `crop` leaves of `past`; a positive argument is the length to keep, as before transformers 5.24."""
    return min(tokens_to_remove, past) if tokens_to_remove > 0 else max(past + tokens_to_remove, 0)
