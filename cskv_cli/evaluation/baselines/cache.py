"""What the baselines have in common: a cache whose full-attention layers are the method's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from cskv_cli.errors import CskvError
from cskv_cli.modeling.cskv_positions import Rows
from cskv_cli.modeling.cskv_structure import attentions, find_decoder
from cskv_cli.modeling.modeling_cskv import CACHE


class BaselineLayer(CacheLayerMixin):
    """One layer of a method: filled by a prefill, which reads exact keys and values, then a token at a time.

    Inside `attached`, a forward calls `make_room`, `update` and `settle`, in this order.

    Attributes:
        tokens: given so far to each row, padding included.
    """

    is_sliding, is_croppable, is_compileable, supports_early_init = False, False, False, False
    reads_attention = False

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.tokens = 0

    def make_room(self) -> torch.Tensor | None:
        """Before a token is added: what it sees, [batch, kept + 1], True where it sees; None: all but padding."""
        return None

    def settle(self, received: torch.Tensor | None) -> None:
        """After a forward: let go of what the method does not keep.

        Args:
            received: [batch, heads, kept], the attention that each key got from the new queries, summed over them and
                averaged over the query heads of its group; None unless `reads_attention`.
        """

    def seen(self, more: int = 0) -> torch.Tensor:
        """[batch]: tokens given so far, and `more`, without padding."""
        return (self.tokens + more - self.rows.read_exactly(0, self.device)).clamp(min=0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember where the cache lives."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def get_seq_length(self) -> int:
        """Tokens given so far: where the next one stands, however many are kept."""
        return self.tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the mask that the model makes; `make_room` gives another where fewer are kept."""
        return self.tokens + query_length, 0


class BaselineCache(Cache):
    """`make_layer(rows)` in each layer with full attention; the others, bounded anyway, as transformers has them."""

    def __init__(self, config: PretrainedConfig, make_layer: Callable[[Rows], BaselineLayer]) -> None:
        self.rows = Rows()
        layers = DynamicCache(config=config).layers
        super().__init__(layers=[make_layer(self.rows) if type(layer) is DynamicLayer else layer for layer in layers])


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """Inside, forwards of `model` serve the layers of a `BaselineCache` that they are given."""
    with ExitStack() as stack:
        stack.callback(find_decoder(model).module.register_forward_pre_hook(_begin, with_kwargs=True).remove)
        for attention in attentions(model):
            stack.callback(attention.register_forward_pre_hook(_before, with_kwargs=True).remove)
            stack.callback(attention.register_forward_hook(_after, with_kwargs=True).remove)
        yield


def received_attention(weights: torch.Tensor | None, heads: int, starts: torch.Tensor, past: int) -> torch.Tensor:
    """What each key got, [batch, heads, keys], of attention probabilities [batch, query heads, queries, keys].

    Args:
        starts: [batch or 1], where each row's real tokens begin; the queries before are padding and do not count.
        past: tokens before the first query.

    Raises:
        CskvError: there are no probabilities.
    """
    if weights is None:
        raise CskvError("this model does not give its attention probabilities", "h2o needs them: leave it out")
    queries = past + torch.arange(weights.shape[2], device=weights.device)
    real = queries >= starts.to(weights.device)[:, None]
    return torch.einsum("bhqk,bq->bhk", weights.float(), real.float()).unflatten(1, (heads, -1)).mean(2)


def _begin(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if isinstance(cache := kwargs.get(CACHE), BaselineCache):
        cache.rows.see(kwargs.get("attention_mask"))


def _layer(attention: nn.Module, kwargs: dict[str, Any]) -> BaselineLayer | None:
    cache = kwargs.get(CACHE)
    layer = cache.layers[attention.layer_idx] if isinstance(cache, BaselineCache) else None
    return layer if isinstance(layer, BaselineLayer) else None


def _before(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    layer = _layer(attention, kwargs)
    if layer is not None and layer.tokens and (seen := layer.make_room()) is not None:
        dtype = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        kwargs["attention_mask"] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None, None]
    return args, kwargs


def _after(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> None:
    if (layer := _layer(attention, kwargs)) is None:
        return
    received = None
    if layer.reads_attention:
        starts, weights = layer.rows.read_exactly(0, layer.device), output[1]
        queries = 0 if weights is None else weights.shape[2]
        received = received_attention(weights, layer.keys.shape[1], starts, layer.tokens - queries)
    layer.settle(received)
