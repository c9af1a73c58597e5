"""Decode simulation: one parallel forward in which every token sees what it would see if it were decoded.

A plain forward pass never reads the compressed history, since prefill is exact; it would show no loss at all.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cskv_cli.modeling.cskv_cache import CSKVCache, CSKVLayer
from cskv_cli.modeling.cskv_decode import StepConfig, asks_for_function, eager_function
from cskv_cli.modeling.cskv_structure import attentions, cache_name

BLOCK = 128  # queries whose attention is computed together


class _Doubled:
    """Stands in for a cache in one attention layer: gives it the exact keys and values, then the rebuilt ones."""

    def __init__(self, rebuilt: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.rebuilt = rebuilt

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """[batch, heads, tokens, head_dim] becomes [batch, heads, 2 * tokens, head_dim]."""
        return tuple(torch.cat(pair, dim=2) for pair in zip((keys, values), self.rebuilt, strict=True))


@contextmanager
def decode_simulation(model: PreTrainedModel, prefill: int = 0) -> Iterator[None]:
    """Inside, a forward of `model` (a CSKV model) with `use_cache=False` on whole, unpadded windows [batch, tokens]
    gives the logits that feeding the tokens through a `CSKVCache` would give: the first `prefill` at once, then one by
    one.

    Query i sees exact keys and values of the tokens j > i - window and j < sinks, and of the others those rebuilt from
    their (dequantized) latents; a query of the prefill sees all of them exactly. Differentiable with respect to the
    factors.
    """
    masks: dict[Any, _Mask] = {}
    with ExitStack() as stack:
        for attention, layer in zip(attentions(model), CSKVCache(model.config).layers, strict=True):
            if isinstance(layer, CSKVLayer):
                function = _attention_function(attention)
                hook = _hook(layer, prefill, masks, function)
                stack.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if function is not None:
                    stack.callback(vars(attention).pop, "step", None)
                    stack.callback(setattr, attention, "config", attention.config)
                    attention.config = StepConfig(attention.config)
        yield


def _attention_function(attention: nn.Module) -> Callable | None:
    """What computes the layer's attention; None where the layer does so by itself."""
    if not asks_for_function(attention):
        return None
    if attention.config._attn_implementation == "eager":
        return eager_function(attention.base)
    return ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]


def _hook(layer: CSKVLayer, prefill: int, masks: dict[Any, "_Mask"], function: Callable | None) -> Any:
    def before(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        keys, values = latents_of(attention, layer, hidden)
        rotation = kwargs.get("position_embeddings")
        kwargs[cache_name(attention)] = _Doubled(
            (attention.rebuild_keys(keys, rotation), attention.rebuild_values(values))
        )
        key = hidden.shape[1], layer.window, layer.sinks, prefill, hidden.device, hidden.dtype
        if key not in masks:
            masks[key] = _Mask(simulation_mask(*key))
        kwargs["attention_mask"] = masks[key].whole
        if function is not None:
            attention.step = functools.partial(masks[key].attend, function, attention)
        return args, kwargs

    return before


class _Mask:
    """A simulation mask, and its parts for a block of queries each, with those keys alone that any of them sees."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.parts = whole, []
        for rows in whole.split(BLOCK, dim=2):
            columns = (rows == 0).any(2).flatten().nonzero()[:, 0]
            self.parts.append((columns, rows[..., columns].contiguous()))

    def attend(
        self, function: Callable, attention: nn.Module, query: torch.Tensor, *states: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """In place of an attention function, by way of it: [batch, tokens, heads, head_dim], and None."""
        kwargs.pop("attention_mask", None)
        outputs = []
        for queries, (columns, mask) in zip(query.split(BLOCK, dim=2), self.parts, strict=True):
            seen = [part.index_select(2, columns) for part in states[:2]]
            outputs.append(function(attention, queries, *seen, attention_mask=mask, **kwargs)[0])
        return torch.cat(outputs, dim=1), None


def latents_of(attention: nn.Module, layer: CSKVLayer, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents [batch, tokens, rank] of keys and of values that the cache would give back for inputs `hidden`."""
    latents = []
    for down, quantizer in zip((attention.k_down, attention.v_down), layer.quantizers, strict=True):
        latent = down(hidden)
        if quantizer is not None:  # the last, unfinished group lies in the window of every query that sees it
            full = latent.shape[1] // quantizer.group * quantizer.group
            latent = torch.cat([quantizer.round_trip(latent[:, :full], layer.sinks), latent[:, full:]], dim=1)
        latents.append(latent)
    return tuple(latents)


def simulation_mask(
    tokens: int,
    window: int,
    sinks: int,
    prefill: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What query i (row) sees of the exact keys (first `tokens` columns) and of the rebuilt ones (the other columns).

    Returns:
        [1, 1, tokens, 2 * tokens], 0 where it sees and the lowest number of `dtype` where not.
    """
    query, key = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)
    causal = key <= query
    exact = (key > query - window) | (key < sinks) | (query < prefill)
    seen = torch.cat([causal & exact, causal & ~exact], dim=1)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
