"""The cache of one compressed layer: exact keys and values where attention looks most, latents elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .cskv_factors import Scratch
from .cskv_latents import Latents, frozen
from .cskv_positions import RotaryHistory, Rows, TensorMap

if TYPE_CHECKING:
    from .cskv_attention import CSKVAttention
    from .cskv_decode import DecodeStep

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [batch, heads, tokens, head_dim]

WAITING = 8  # tokens whose latents a decode step makes at once: it reads a matrix for eight of them, not for each


class CSKVLayer(CacheLayerMixin):
    """The cache of one compressed layer.

    Attributes:
        exact: keys and values, [batch, 2, heads, sinks + at most window, head_dim], of the sinks and then of the last
            tokens (more of these while past is recorded). A full window is a ring: token i is in place i % window.
        latents: of the keys and of the values, for all tokens but those that wait.
        waiting: hidden states [batch, 1, hidden] of each of the last tokens, at most 8, that has no latents yet: none
            is read before its token leaves the window. `late` of them.
    """

    is_sliding, is_croppable, is_compileable, supports_early_init = False, True, False, False

    def __init__(
        self, window: int, sinks: int, quantizers: tuple, rows: Rows, rotary: RotaryHistory, scratch: Scratch
    ) -> None:
        super().__init__()
        self.window, self.sinks, self.rows, self.rotary, self.scratch = window, sinks, rows, rotary, scratch
        self.quantizers = quantizers
        self.group: int | None = next((each.group for each in quantizers if each is not None), None)
        self.record_past = False
        self.asked: str | None = None  # the attention function that the model asks for; None: all keys must be there
        self._staged: tuple | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.exact: torch.Tensor | None = None
        self.wait([])
        self.latents = Latents(self.quantizers[0], tokens_last=True), Latents(self.quantizers[1])
        self.is_initialized = False

    def wait(self, hidden: list[torch.Tensor]) -> None:
        """Let only these tokens wait for latents."""
        self.waiting, self.late = hidden, len(hidden)  # a list's length would be a constant to torch.compile

    @property
    def keys(self) -> torch.Tensor | None:
        """The exact keys of the last tokens, [batch, heads, tokens, head_dim]."""
        return None if self.exact is None else self.in_order()[:, 0, :, self.sinks :]

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return None if self.exact is None else self.in_order()[:, 1, :, self.sinks :]

    @keys.setter
    def keys(self, nothing: None) -> None:
        """For the constructor of the base class."""

    @values.setter
    def values(self, nothing: None) -> None:
        """For the constructor of the base class."""

    @property
    def recent(self) -> int:
        """How many of the last tokens are exact."""
        return self.exact.shape[3] - self.sinks

    def oldest(self, total: int) -> int:
        """The place in the window of its first token, with `total` in the cache."""
        return total % self.window if self.recent == self.window else 0

    def in_order(self) -> torch.Tensor:
        """`exact`, with the last tokens in the order in which they came."""
        return self._turned(self.exact, self.oldest(self.get_seq_length()))

    def hold(self, exact: torch.Tensor) -> None:
        """Replace `exact` by one that is in order."""
        self.exact = exact
        self.exact = self._turned(exact, -self.oldest(self.get_seq_length()) % self.window)

    def _turned(self, exact: torch.Tensor, places: int) -> torch.Tensor:
        if not places:
            return exact
        sinks, first, last = exact.tensor_split((self.sinks, self.sinks + places), dim=3)
        return torch.cat([sinks, last, first], dim=3)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember where the cache lives."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def stage(
        self, attention: CSKVAttention, hidden: torch.Tensor, kwargs: dict[str, Any], step: DecodeStep | None = None
    ) -> None:
        """Take what `update` needs beyond its arguments; the attention layer hands it over just before.

        With a `step`, `update` gives it the history, and returns only the new token.

        Args:
            hidden: states of the new tokens, [batch, new, hidden].
        """
        self._staged = attention, hidden, kwargs.get("position_ids"), kwargs.get("position_embeddings"), step

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
        (attention, hidden, positions, rotation, step), self._staged = self._staged, None
        past = self.get_seq_length()
        if rotation is not None:
            self.rotary.extend(past, positions, *rotation)
        if step is not None:
            self._add_hidden(attention, hidden, self._may_wait(past + 1, attention.layer_idx))
            self._add_one(key_states, value_states, past)
            step.read(self, past + 1)
            self._pack()
            return key_states, value_states
        exact = key_states, value_states
        if past:
            left = 0 if self.record_past else max(self.recent - self.window + 1, 0)  # by the first new token
            kept = self.in_order()[:, :, :, self.sinks + left :].unbind(1)
            exact = tuple(torch.cat(pair, dim=2) for pair in zip(kept, exact, strict=True))
        else:
            self.lazy_initialization(key_states, value_states)
        self._add_hidden(attention, hidden)
        states = self._all(attention, exact, past + key_states.shape[2], rotation is not None)
        self._hold(exact, self._place_sinks(states, exact, past))
        return states

    def _may_wait(self, total: int, index: int) -> bool:
        """Whether the last of `total` tokens needs no latents yet; layers differ by `index` in when it does.

        It does at the latest when it completes a group, which is packed then.
        """
        if self.group is not None and total % self.group == 0:
            return False
        return (total + index) % min(WAITING, self.window) != 0

    def _add_hidden(self, attention: CSKVAttention, hidden: torch.Tensor, may_wait: bool = False) -> None:
        self.wait([*self.waiting, hidden])
        if may_wait:
            return
        hidden = hidden if self.late == 1 else torch.cat(self.waiting, dim=1)
        for store, down in zip(self.latents, (attention.k_down, attention.v_down), strict=True):
            store.append(down(hidden))
        self.wait([])

    def decodes(self) -> bool:
        """Whether the next token, if it comes alone, can be a `DecodeStep`: all sinks have left the window."""
        if self.asked is None or self.record_past or not self.is_initialized:
            return False
        old = self.get_seq_length() + 1 - min(self.recent + 1, self.window)
        if any(store.quantizer is not None and store.quantized_tokens < old for store in self.latents):
            return False
        return old > self.rows.bounds()[1] + self.sinks

    def _add_one(self, key: torch.Tensor, value: torch.Tensor, past: int) -> None:
        """Put the last token in the place of the one that leaves the window, or add it to a window that is not full."""
        if self.recent == self.window:
            self.exact = self.exact.clone() if frozen(self.exact) else self.exact
            place = self.sinks + past % self.window
            torch.stack((key, value), dim=1, out=self.exact[:, :, :, place : place + 1])
            return
        left = max(self.recent - self.window + 1, 0)
        kept = self.exact[:, :, :, : self.sinks], self.exact[:, :, :, self.sinks + left :]
        self.hold(torch.cat([*kept, torch.stack((key, value), dim=1)], dim=3))

    def _all(self, attention: CSKVAttention, exact: Pair, total: int, rotates: bool) -> Pair:
        """Rebuilt keys and values of the tokens before those that are exact, and then these."""
        if not (old := total - exact[0].shape[2]):
            return exact
        rotation = self.rotary.first(old, exact[0]) if rotates else None
        latent_keys, latent_values = (store.first(old) for store in self.latents)
        rebuilt = attention.rebuild_keys(latent_keys, rotation), attention.rebuild_values(latent_values)
        return tuple(torch.cat(pair, dim=2) for pair in zip(rebuilt, exact, strict=True))

    def _place_sinks(self, states: Pair, exact: Pair, past: int) -> Pair:
        """The sinks, of which some may be new; all are put where keys and values (`states`) have rebuilt ones."""
        if not self.sinks:
            return tuple(part[:, :, :0] for part in exact)
        total, rebuilt = states[0].shape[2], states[0].shape[2] - exact[0].shape[2]
        last = self.rows.read_exactly(self.sinks, states[0].device).unsqueeze(1)
        place = last + torch.arange(-self.sinks, 0, device=last.device)
        place = place.clamp(max=total - 1)[:, None, :, None]  # a sink to come is the last token for now
        held = []
        for i, (all_of_them, part) in enumerate(zip(states, exact, strict=True)):
            index = (place - rebuilt).clamp(min=0).expand(*part.shape[:2], -1, part.shape[3])
            sinks = part.gather(2, index)
            if self.exact is not None:
                sinks = torch.where(place < past, self.exact[:, i, :, : self.sinks], sinks)
            if rebuilt:
                all_of_them.scatter_(2, place.expand_as(sinks), sinks)
            held.append(sinks)
        return tuple(held)

    def _hold(self, exact: Pair, sinks: Pair) -> None:
        """Keep what is exact, but for what lies before the window; and pack the latents that fill a group."""
        start = 0 if self.record_past else max(exact[0].shape[2] - self.window, 0)
        pairs = zip(sinks, (part[:, :, start:] for part in exact), strict=True)
        self.hold(torch.stack([torch.cat(pair, dim=2) for pair in pairs], dim=1))
        if not self.record_past:
            self._pack()

    def _pack(self) -> None:
        if any(store.unpacked_groups for store in self.latents):
            for store in self.latents:
                store.settle(self.rows.read_exactly(self.sinks, self.exact.device))

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return len(self.latents[0]) + self.late

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
        exact = self.in_order()
        if length < past:
            self.wait(self.waiting[: max(length - len(self.latents[0]), 0)])
            for store in self.latents:
                store.crop(length)
        stop = self.sinks + max(self.recent - (past - length), 0)
        start = max(stop - self.window, self.sinks)
        self.hold(torch.cat([exact[:, :, :, : self.sinks], exact[:, :, :, start:stop]], dim=3))
        self._pack()

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
        self.exact = fn(self.exact)
        self.waiting = [fn(hidden) for hidden in self.waiting]
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
