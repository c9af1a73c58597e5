"""Bytes that a cache really holds, from its tensors."""

from typing import Any

import torch
from torch import nn
from transformers import Cache

from cskv_cli.modeling.cskv_positions import Rows


def held_bytes(cache: Cache) -> int:
    """Bytes kept alive by the layers with full attention, what is known of padding left out."""
    return reachable_bytes([layer for layer in cache.layers if not layer.is_sliding], but=(Rows,))


def reachable_bytes(thing: Any, but: tuple[type, ...] = ()) -> int:
    """Bytes of all tensors that can be reached from an object; a view counts with all that it is a view of.

    Args:
        but: kinds of objects that are not looked into; models and classes never are.
    """
    storages: dict[int, int] = {}
    seen, rest = set(), [thing]
    while rest:
        thing = rest.pop()
        if id(thing) in seen or isinstance(thing, (type, nn.Module, *but)):
            continue
        seen.add(id(thing))
        if torch.is_tensor(thing):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple | set):
            rest += thing
        else:
            rest += (thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})).values()
    return sum(storages.values())
