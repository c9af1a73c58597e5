"""A bi-branch KV cache (CSKV, arXiv 2409.10593): exact keys and values where attention looks most, latents elsewhere.

Exact are the last `window` tokens and each row's first `sinks` tokens; what attention reads of the tokens between is
rebuilt from low-rank latents, a layer at a time, and dropped again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .cskv_factors import Scratch
from .cskv_layer import CSKVLayer, tokens_kept
from .cskv_positions import RotaryHistory, Rows, TensorMap
from .cskv_quantizer import Quantizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


class CSKVCache(Cache):
    """The cache of a whole model: a `CSKVLayer` where `config.cskv` gives ranks, else what transformers would use."""

    def __init__(self, config: PretrainedConfig, **kwargs: Any) -> None:
        cskv = config.cskv
        layers = DynamicCache(config=config).layers
        kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"] * len(layers)
        self.rows, self.scratch = Rows(), Scratch()
        self.rotaries = {kind: RotaryHistory(kind) for kind in kinds}
        for i, rank in enumerate(cskv["rank_k"]):
            if rank is not None:
                quantizers = _quantizer(cskv, "k", i), _quantizer(cskv, "v", i)
                shared = self.rows, self.rotaries[kinds[i]], self.scratch
                layers[i] = CSKVLayer(cskv["window"], cskv["sinks"], quantizers, *shared)
        self.recorded_for_generate = False
        super().__init__(layers=layers, **kwargs)

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take tokens back exactly (see `CSKVLayer`)."""
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):  # not so in transformers 4.x and early 5.x
                layer.activate_past_recording()

    def begin(self, model: nn.Module, attention_mask: Any, asked: str | None = None) -> None:
        """Before each forward: learn of padding, and borrow the rotary embedding; `asked` is for `CSKVLayer.asked`."""
        self.rows.see(attention_mask)
        for layer in self.layers:
            layer.asked = asked
        for rotary in self.rotaries.values():
            rotary.begin(model)

    def end(self) -> None:
        """After each forward: keep nothing that can be computed again."""
        self.rows.end()
        self.scratch.end()
        for layer in self.layers:
            if isinstance(layer, CSKVLayer):
                layer.unstage()
        for rotary in self.rotaries.values():
            rotary.end()

    def record_past_for_generate(self, wanted: bool) -> None:
        """Record the past for a `generate` that takes tokens back, and no longer in the next one that does not."""
        if wanted:
            self.activate_past_recording()
        elif self.recorded_for_generate:
            for layer in self.layers:
                if getattr(layer, "record_past", False):
                    if layer.is_initialized:
                        layer.crop(0)  # lets go of what a sliding window has left behind
                    layer.record_past = False
        self.recorded_for_generate = wanted

    def _apply(self, fn: TensorMap) -> None:
        """Index what all layers share as the layers themselves; a row that stands for the whole batch stays."""
        for shared in (self.rows, *self.rotaries.values()):
            shared.apply(lambda t: t if len(t) == 1 else fn(t))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take the rows of the beams that go on."""
        super().reorder_cache(beam_idx)
        self._apply(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._apply(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        self._apply(lambda t: t[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as `CSKVLayer.crop`: in all layers, or in none.

        Raises:
            ValueError: the cut goes through a packed group, or what a sliding window would need then is gone.
        """
        past = self.get_seq_length()
        if not (length := tokens_kept(past, tokens_to_remove)):
            self.reset()
            return
        for layer in self.layers:
            if isinstance(layer, CSKVLayer):
                layer.check_crop(length - past)
            elif layer.is_sliding and length < past:
                _check_window(layer, length, past)
        for layer in self.layers:
            if length < past or getattr(layer, "record_past", False):
                layer.crop(length - past)
        for rotary in self.rotaries.values():
            rotary.apply(lambda t: t[:, :length].clone())

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        for layer in self.layers:
            layer.keys = layer.values = None  # in transformers 4.x they stay, as zeros
            layer.is_initialized = False
        self.rows.reset()
        for rotary in self.rotaries.values():
            rotary.reset()


def _quantizer(cskv: dict[str, Any], name: str, layer: int) -> Quantizer | None:
    bits = cskv[f"bits_{name}"][layer]
    if bits is None:
        return None
    return Quantizer(bits, cskv["group"], per_channel=name == "k", clip=cskv[f"clip_{name}"][layer])


def _check_window(layer: CacheLayerMixin, length: int, past: int) -> None:
    if layer.keys.shape[2] - (past - length) < min(length, layer.sliding_window - 1):
        raise ValueError(
            f"cannot crop this cache to {length} tokens: a layer keeps {layer.sliding_window} of {past}. "
            "Call `activate_past_recording` before the tokens are added that may be removed."
        )
