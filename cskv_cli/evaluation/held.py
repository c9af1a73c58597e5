"""Bytes that a cache really holds, from its tensors."""

from typing import Any

import torch
from torch import nn
from transformers import Cache

from cskv_cli.modeling.cskv_positions import Rows


def held_bytes(cache: Cache) -> int:
    """Bytes kept alive by the layers with full attention; a view counts with all that it is a view of."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    for layer in cache.layers:
        if not layer.is_sliding:
            _collect(layer, storages, seen)
    return sum(storages.values())


def _collect(thing: Any, storages: dict[int, int], seen: set[int]) -> None:
    if id(thing) in seen or isinstance(thing, nn.Module | Rows | type):
        return
    seen.add(id(thing))
    if torch.is_tensor(thing):
        storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        return
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else None
    for part in vars(thing).values() if parts is None and hasattr(thing, "__dict__") else parts or ():
        _collect(part, storages, seen)
