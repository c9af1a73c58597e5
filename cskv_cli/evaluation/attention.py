"""The output of one attention layer when its keys and values are replaced, to tell what an error in them does."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cskv_cli.checkpoint.layers import kv_projections
from cskv_cli.checkpoint.rotary import inputs_for
from cskv_cli.modeling.cskv_attention import put_in_front
from cskv_cli.modeling.cskv_structure import cache_name


class _Replacement:
    """Stands in for a cache: whatever keys and values come, it gives back its own."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.states = keys, values

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `transformers.Cache.update`."""
        return self.states


class AttentionOutput:
    """Output of a base attention layer on runs of its input, as a function of what its projections give.

    Args:
        model: the base model the layer is from; nothing but its config and rotary embedding is used.
        attention: the layer, its weights in memory. It is changed into its CSKV class, whose rebuilding of keys and
            values this needs.
        hidden: [runs, tokens, hidden]; each run is read as a text of its own.
    """

    def __init__(self, model: PreTrainedModel, attention: nn.Module, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self._attention = attention
        if not hasattr(attention, "base"):
            put_in_front(attention, model.config.get_text_config(decoder=True))
            attention.k_up = attention.v_up = nn.Identity()
        self._inputs = inputs_for(model, attention.layer_idx, hidden.shape[1])
        self._rotation = self._inputs["position_embeddings"]

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[runs, tokens, hidden] from keys and values [runs, tokens, channels] before bias, norm and RoPE."""
        attention = self._attention
        biases = [bias for _, bias in kv_projections(attention).values()]
        k, v = (states if bias is None else states + bias for states, bias in zip((k, v), biases, strict=True))
        cache = _Replacement(attention.rebuild_keys(k, self._rotation), attention.rebuild_values(v))
        return attention(hidden_states=self.hidden, **self._inputs, **{cache_name(attention): cache})[0]
