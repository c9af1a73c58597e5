"""The model whose factors are trained: frozen weights of the base, factors in float32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from cskv_cli import factors
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.layers import kv_projections
from cskv_cli.checkpoint.load import load_unfilled
from cskv_cli.layout import Layout
from cskv_cli.modeling.cskv_cache import CSKVCache, CSKVLayer
from cskv_cli.modeling.cskv_structure import attentions

PARTS = ("k_down", "k_up", "v_down", "v_up")


def load_student(
    base: BaseModel, layout: Layout, factors_folder: Path, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """The CSKV model of a base and of factors, only the factors (and the biases of their B) to be trained."""
    attention = "eager" if device == "cpu" else None  # whose gradients a CPU computes in half the time
    model = load_unfilled(base.folder, layout, dtype, attention).to(device)
    model.requires_grad_(False)
    modules = attentions(model)
    for i in layout.layers:
        attention, loaded = modules[i], factors.load_layer(factors_folder, i)
        for name, (_, bias) in kv_projections(attention).items():
            down, up = getattr(attention, f"{name}_down"), getattr(attention, f"{name}_up")
            bias = loaded.get(f"{name}.bias", bias)
            for parameter, value in ((down.weight, loaded[f"{name}.a"].T), (up.weight, loaded[f"{name}.b"].T)):
                parameter.data = value.to(device, torch.float32).contiguous()
            if bias is not None:
                up.bias.data = bias.to(device, torch.float32)
    for parameter in trained(model).values():
        parameter.requires_grad_(True)
    return model


def trained(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters to train, by name, layer by layer."""
    return {name: p for name, p in model.named_parameters() if name.split(".")[-2] in PARTS}


def layer_of(name: str) -> int:
    """The layer a trained parameter belongs to."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def as_factors(tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """Trained tensors by layer, as `factors.save_layer` takes them."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        *_, part, kind = name.split(".")
        key = "bias" if kind == "bias" else {"down": "a", "up": "b"}[part[2:]]
        value = tensor if kind == "bias" else tensor.T
        layers.setdefault(layer_of(name), {})[f"{part[0]}.{key}"] = value.cpu()
    return layers


def compressed_layers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, CSKVLayer]]:
    """Attention and cache layer of each layer that has factors."""
    for attention, layer in zip(attentions(model), CSKVCache(model.config).layers, strict=True):
        if isinstance(layer, CSKVLayer):
            yield attention, layer


def precision(model: PreTrainedModel) -> AbstractContextManager:
    """Autocast to the dtype of the frozen weights, where that has 16 bits."""
    if model.dtype.itemsize > 2:
        return nullcontext()
    return torch.autocast(model.device.type, model.dtype)
