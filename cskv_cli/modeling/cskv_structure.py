"""Where a model of transformers keeps its decoder, the layers of that, their attention, and keys and values therein."""

from __future__ import annotations

import functools
import inspect
from typing import NamedTuple

import torch
from torch import nn

CACHE_NAMES = "cache", "past_key_values", "layer_past"  # from transformers 5.24; before it; Bloom, Falcon, GPT-NeoX
FUSED = {  # the projection that queries, keys and values share, and whether its rows go head by head
    "qkv_proj": False,
    "Wqkv": False,
    "c_attn": False,
    "query_key_value": True,
    "kv_proj": False,  # JetMoe, whose queries come from experts
}


class Decoder(NamedTuple):
    """The part of a model that turns tokens into hidden states.

    Attributes:
        name: its path in the model, such as `model`, `gpt_neox` or `model.language_model`.
        layers: in the order in which tokens pass them.
        layers_name: their path in the model.
    """

    name: str
    module: nn.Module
    layers: nn.ModuleList
    layers_name: str


def find_decoder(model: nn.Module) -> Decoder:
    """The module whose list of layers holds one attention with a cache for each layer of the config.

    Raises:
        ValueError: there is none.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for name, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == count and find_attention(layers[0]) is not None:
            parent = name.rpartition(".")[0]
            return Decoder(parent, model.get_submodule(parent), layers, name)
    raise ValueError(f"{type(model).__name__} has no list of {count} layers with a cache")


def find_attention(layer: nn.Module) -> nn.Module | None:
    """The module in a decoder layer that takes a cache and makes keys and values; None where there is none.

    Where it cannot be told how keys and values are made, it is the outermost one that knows its number.
    """
    inside = (module for module in layer.modules() if module is not layer and hasattr(module, "layer_idx"))
    found = [module for module in inside if cache_name(module)]
    known = (module for module in found if any(hasattr(module, name) for name in ("k_proj", *FUSED)))
    return next(known, found[0] if found else None)


def cache_name(module: nn.Module) -> str | None:
    """What the forward of a module, or of the base of a `CSKVAttention`, calls its cache; None if it takes none."""
    return next((name for name in CACHE_NAMES if takes(module, name)), None)


def takes(module: nn.Module, name: str) -> bool:
    """Whether the forward of a module, or of the base of a `CSKVAttention`, has an argument of that name."""
    kind = type(module)
    return name in _arguments(getattr(kind, "base", kind))


@functools.cache
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def attentions(model: nn.Module) -> list[nn.Module]:
    """The attention of each decoder layer."""
    return [find_attention(layer) for layer in find_decoder(model).layers]


def width_of_head(attention: nn.Module) -> int:
    """Channels of one head of keys."""
    return getattr(attention, "head_dim", None) or attention.head_size


def repeats(attention: nn.Module) -> int:
    """How often each head of keys is cached: Falcon gives each query its own."""
    if not getattr(attention, "new_decoder_architecture", False):
        return 1
    return attention.num_heads // attention.num_kv_heads


def key_value_rows(attention: nn.Module) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """The linear layers that make keys ("k") and values ("v"), and which of their outputs those are, [channels].

    In a shared projection each group of heads has its queries first, then its keys, then its values.

    Raises:
        ValueError: there are no such layers.
    """
    if all(isinstance(getattr(attention, f"{name}_proj", None), nn.Module) for name in "kv"):
        linears = {name: getattr(attention, f"{name}_proj") for name in "kv"}
        return {name: (linear, torch.arange(_outputs(linear))) for name, linear in linears.items()}
    name = next((name for name in FUSED if hasattr(attention, name)), None)
    if name is None:
        raise ValueError(f"{type(attention).__name__} has no key and value projection that CSKV knows")
    linear, width = getattr(attention, name), width_of_head(attention)
    heads = _outputs(linear) // width
    cached = (heads - (0 if name == "kv_proj" else _query_heads(attention))) // 2
    by_head = FUSED[name] or isinstance(linear, nn.Linear) and name == "c_attn"  # GPTBigCode, unlike GPT-2
    rows = torch.arange(_outputs(linear)).view(cached if by_head else 1, -1, width)
    size = cached // len(rows)
    return {"k": (linear, rows[:, -2 * size : -size].flatten()), "v": (linear, rows[:, -size:].flatten())}


def weight_by_input(linear: nn.Module) -> torch.Tensor:
    """The weight of a linear layer as [inputs, outputs]."""
    return linear.weight.mT if isinstance(linear, nn.Linear) else linear.weight  # Conv1D of GPT-2


def _outputs(linear: nn.Module) -> int:
    return weight_by_input(linear).shape[1]


def _query_heads(attention: nn.Module) -> int:
    for name in ("num_attention_heads", "num_heads", "n_heads"):
        if hasattr(attention, name):
            return getattr(attention, name)
    return attention.config.num_attention_heads
