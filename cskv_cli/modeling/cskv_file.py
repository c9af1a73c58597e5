"""Prompt caches: what a `CSKVCache` holds of a text that was read once, in a safetensors file.

`safetensors` is what transformers itself reads weights with, and is always installed beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cskv_cache import CSKVCache
from .cskv_layer import CSKVLayer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

FORMAT = 2
HEADER = "cskv_cache"  # the key of the file's metadata
SAMPLES = 16  # numbers of each weight that tell one model from another
KINDS = CSKVLayer, DynamicLayer, DynamicSlidingWindowLayer  # of layers that a file can hold
STATE = "record_past", "cumulative_length"  # of a layer, beside its tensors


def write_cache(path: str | os.PathLike, cache: CSKVCache, model: dict[str, Any]) -> None:
    """Write a cache, whole or not at all: its tensors as they are, on the CPU, without the room they have to grow.

    Args:
        model: `describe` of the model that filled it.

    Raises:
        ValueError: it is no `CSKVCache`, or has a layer of a kind that a file cannot hold.
    """
    if not isinstance(cache, CSKVCache):
        raise ValueError(f"only a CSKVCache can be saved, and this is a {type(cache).__name__}")
    if odd := [layer for layer in cache.layers if type(layer) not in KINDS]:
        raise ValueError(f"cannot save a cache with a {type(odd[0]).__name__}")
    tensors = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in _tensors(cache).items()
    }
    layers = [{name: getattr(layer, name) for name in STATE if hasattr(layer, name)} for layer in cache.layers]
    header = {"format": FORMAT, **model, "layers": layers, "recorded": cache.recorded_for_generate}
    header["digest"] = _digest(header, tensors)
    path = Path(path)
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        save_file(tensors, beside, metadata={HEADER: json.dumps(header)})
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_cache(path: str | os.PathLike, config: PretrainedConfig, attentions: list[nn.Module]) -> CSKVCache:
    """The cache that `write_cache` wrote, each layer where its attention layer is.

    Raises:
        ValueError: the file is damaged, no prompt cache, or one of another model or other settings.
    """
    header, tensors = _read(path)
    _check_model(path, header, describe(config, attentions))
    cache = CSKVCache(config)
    devices = [_device(attention) for attention in attentions]
    places = {name: devices[int(name.split(".")[1])] if name.startswith("layers.") else devices[0] for name in tensors}
    # a copy: the tensors of a file are read from it as they are used
    _fill(cache, {name: tensor.to(places[name], copy=True) for name, tensor in tensors.items()}, header["layers"])
    cache.recorded_for_generate = header["recorded"]
    return cache


def describe(config: PretrainedConfig, attentions: list[nn.Module]) -> dict[str, Any]:
    """What a cache must have in common with the model that goes on from it.

    That is its settings, its precision, and for each attention layer a digest of some of the numbers of its weights;
    None where these are not in memory (offloaded to a disk), which then are not compared.
    """
    dtypes = (p.dtype for attention in attentions for p in attention.parameters() if p.is_floating_point())
    return {
        "model_type": config.model_type,
        "dtype": str(next(dtypes)).removeprefix("torch."),
        "cskv": json.loads(json.dumps(config.cskv)),
        "weights": [_weights_digest(attention) for attention in attentions],
    }


def _tensors(cache: CSKVCache) -> dict[str, torch.Tensor]:
    """Every tensor of a cache, by its name in a file."""
    found = {"rows.starts": cache.rows.starts}
    for kind, rotary in cache.rotaries.items():
        found |= {f"rotaries.{kind}.{name}": getattr(rotary, name) for name in rotary.NAMES}
    for i, layer in enumerate(cache.layers):
        found |= {f"layers.{i}.{name}": getattr(layer, name) for name in _names(layer)}
        if isinstance(layer, CSKVLayer) and layer.is_initialized:
            found[f"layers.{i}.exact"] = layer.in_order()
        if waiting := getattr(layer, "waiting", None):
            found[f"layers.{i}.waiting"] = torch.cat(waiting, dim=1)
        for branch, store in zip("kv", getattr(layer, "latents", ()), strict=False):
            found |= {f"layers.{i}.{branch}.{name}": tensor for name, tensor in store.tensors().items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _fill(cache: CSKVCache, tensors: dict[str, torch.Tensor], states: list[dict[str, Any]]) -> None:
    """The inverse of `_tensors`, into an empty cache; `states` are those of its layers."""
    cache.rows.starts = tensors.get("rows.starts")
    for kind, rotary in cache.rotaries.items():
        for name in rotary.NAMES:
            setattr(rotary, name, tensors.get(f"rotaries.{kind}.{name}"))
    for i, (layer, state) in enumerate(zip(cache.layers, states, strict=True)):
        own = {name: tensors[f"layers.{i}.{name}"] for name in _names(layer) if f"layers.{i}.{name}" in tensors}
        if own and isinstance(layer, CSKVLayer):
            layer.lazy_initialization(own["exact"], own["exact"])
            if (waiting := tensors.get(f"layers.{i}.waiting")) is not None:
                layer.wait(list(waiting.split(1, dim=1)))
            for branch, store in zip("kv", layer.latents, strict=True):
                prefix = f"layers.{i}.{branch}."
                store.restore(**{n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
            layer.hold(own.pop("exact"))
        elif own:
            layer.update(own["keys"], own["values"])
        vars(layer).update(own | state)


def _names(layer: Any) -> tuple[str, ...]:
    return ("exact",) if isinstance(layer, CSKVLayer) else ("keys", "values")


def _read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The header and the tensors of a file that is as `write_cache` left it."""
    try:
        with safe_open(path, framework="pt") as file:
            header, names = json.loads((file.metadata() or {}).get(HEADER, "null")), file.keys()
            tensors = {} if header is None else {name: file.get_tensor(name) for name in names}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error
    if header is None:
        raise ValueError(f"{path} is no prompt cache: `save_cache` did not write it")
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is a prompt cache of format {header.get('format')}; this code reads {FORMAT}")
    if header.pop("digest", None) != _digest(header, tensors):
        raise ValueError(f"{path} is damaged: it does not hold what was written to it")
    return header, tensors


def _check_model(path: str | os.PathLike, header: dict[str, Any], model: dict[str, Any]) -> None:
    theirs, ours = ({**each, **each["cskv"]} for each in (header, model))
    for name in ("model_type", "dtype", *sorted({**model["cskv"], **header["cskv"]})):
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"{path} is a prompt cache of another model: its {name} is {theirs.get(name)}, here {ours.get(name)}"
            )
    for i, pair in enumerate(zip(header["weights"], model["weights"], strict=True)):
        if None not in pair and pair[0] != pair[1]:
            raise ValueError(f"{path} is a prompt cache of another model: the attention weights of layer {i} differ")


def _digest(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _weights_digest(attention: nn.Module) -> str | None:
    digest = hashlib.sha256()
    for name, weight in sorted(attention.named_parameters()):
        if weight.is_meta:
            return None
        flat = weight.detach().flatten()
        digest.update(name.encode())
        digest.update(_bytes(flat[:: max(len(flat) // SAMPLES, 1)].cpu()))
    return digest.hexdigest()[:16]


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def _device(attention: nn.Module) -> torch.device:
    """Where a layer computes; accelerate's hooks know it of one whose weights are offloaded."""
    for module in attention.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(attention.parameters()).device
