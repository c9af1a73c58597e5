"""What an attention layer is given beside hidden states, its rotations asked of the model's own rotary embedding."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from cskv_cli.modeling.cskv_structure import attentions, find_decoder, takes


def rotation_for(model: PreTrainedModel, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """cos and sin [1, tokens, rotated dimensions] of positions 0 to tokens - 1, in float32; None without RoPE.

    A fresh rotary embedding is made from the config: the model's own may have no values (on the meta device).
    """
    config = model.config.get_text_config(decoder=True)
    rotary = getattr(find_decoder(model).module, "rotary_emb", None)
    if rotary is None:
        return None
    rotary = type(rotary)(config)
    like, positions = torch.zeros(1), torch.arange(tokens)[None]
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return rotary(like, positions)
    try:
        return rotary(like, positions, config.layer_types[layer])
    except KeyError:  # Beam rotates in its sliding layers only
        return None


def inputs_for(model: PreTrainedModel, layer: int, tokens: int) -> dict[str, Any]:
    """Arguments of the attention of a layer for so many tokens of one text, in float32, but for the hidden states."""
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]
    inputs = {"position_ids": torch.arange(tokens)[None], "attention_mask": mask}
    inputs["position_embeddings"] = rotation_for(model, layer, tokens)
    if takes(attentions(model)[layer], "alibi"):  # Falcon, which has RoPE without it
        inputs["alibi"] = None
    return inputs
