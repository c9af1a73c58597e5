"""A prompt read once, for the caches of several methods: exact keys and values are the same for all of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from cskv_cli.evaluation.baselines.cache import BaselineCache, BaselineLayer, received_attention
from cskv_cli.modeling.cskv_cache import CSKVCache, CSKVLayer
from cskv_cli.modeling.cskv_structure import attentions, find_decoder
from cskv_cli.modeling.modeling_cskv import CACHE


@dataclass
class LayerStates:
    """What one attention layer saw and made of the prompt.

    Attributes:
        hidden: its input, [rows, tokens, hidden].
        keys, values: [rows, heads, tokens, head_dim], rotated.
        received: see `baselines.cache.received_attention`; None unless asked for.
    """

    hidden: torch.Tensor
    rotation: dict[str, Any]
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    received: torch.Tensor | None = None


@dataclass
class Prefill:
    """Prompts of several rows, padded on the left.

    Attributes:
        mask: [rows, tokens], 0 on padding.
        logits: [rows, vocabulary], after the last token.
    """

    mask: torch.Tensor
    logits: torch.Tensor
    layers: list[LayerStates] = field(default_factory=list)

    def fill(self, model: PreTrainedModel, cache: Cache) -> Cache:
        """`cache`, which is empty, as a forward of `model` over the prompt would have filled it.

        Args:
            model: one with the base weights of the model that read the prompt.
        """
        if isinstance(cache, BaselineCache):
            cache.rows.see(self.mask)
        elif isinstance(cache, CSKVCache):
            cache.begin(find_decoder(model).module, self.mask)
        for layer, attention, states in zip(cache.layers, attentions(model), self.layers, strict=True):
            if isinstance(layer, CSKVLayer):
                layer.stage(attention, states.hidden, states.rotation)
            layer.update(states.keys, states.values)
            if isinstance(layer, BaselineLayer):
                layer.settle(states.received)
        if isinstance(cache, CSKVCache):
            cache.end()
        return cache


class _Recorder(DynamicCache):
    """Gives every layer its own keys and values back, and notes them."""

    def __init__(self, model: PreTrainedModel, layers: list[LayerStates]) -> None:
        super().__init__(config=model.config)
        self.states = layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> tuple:
        """See `transformers.Cache.update`."""
        self.states[layer_idx].keys, self.states[layer_idx].values = key_states, value_states
        return key_states, value_states


@torch.inference_mode()
def read(model: PreTrainedModel, documents: list[list[int]], attention: bool = False) -> Prefill:
    """Read prompts in one forward; shorter ones are padded on the left.

    Args:
        attention: note the attention that each token receives; the model must then attend eagerly.
    """
    longest = max(map(len, documents))
    pad = lambda values, row: [0] * (longest - len(row)) + values  # noqa: E731
    ids = torch.tensor([pad(row, row) for row in documents], device=model.device)
    mask = torch.tensor([pad([1] * len(row), row) for row in documents], device=model.device)
    layers: list[LayerStates] = []
    starts = longest - mask.sum(-1)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        rotation = {name: kwargs.get(name) for name in ("position_ids", "position_embeddings")}
        layers.append(LayerStates(hidden, rotation))

    def after(module: nn.Module, args: tuple, output: tuple) -> None:
        states = layers[module.layer_idx]
        states.received = received_attention(output[1], states.keys.shape[1], starts, 0)

    blocks = attentions(model)
    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks] if attention else []
    try:
        logits = forward(model, _Recorder(model, layers), ids, mask)
    finally:
        for hook in hooks:
            hook.remove()
    return Prefill(mask, logits, layers)


def forward(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] after the last of ids [rows, new]; mask [rows, tokens so far] is 0 on padding."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    inputs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, CACHE: cache}
    return model(ids, use_cache=True, logits_to_keep=1, **inputs).logits[:, -1]
