"""cos and sin for a layer, asked of the model's own rotary embedding."""

import inspect

import torch
from transformers import PreTrainedModel


def rotation_for(model: PreTrainedModel, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [1, tokens, rotated dimensions] of positions 0 to tokens - 1, in float32.

    A fresh rotary embedding is made from the config: the model's own may have no values (on the meta device).
    """
    rotary = type(model.model.rotary_emb)(model.config)
    like, positions = torch.zeros(1), torch.arange(tokens)[None]
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return rotary(like, positions)
    return rotary(like, positions, model.config.layer_types[layer])
