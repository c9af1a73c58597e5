"""The formula for cache bytes against what a real cache holds."""

import pytest
import torch
from transformers import DynamicCache

from cskv_cli.checkpoint.load import shape_of
from cskv_cli.layout import Layout
from cskv_cli.memory import Shape, base_bytes, bytes_per_token, cache_bytes
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.modeling_cskv import CACHE
from tests.families import base_model, compressed, truncated


def held_bytes(thing, seen=None) -> int:
    """Bytes of all tensors that can be reached from an object, each storage once."""
    seen = set() if seen is None else seen
    key = thing.untyped_storage().data_ptr() if torch.is_tensor(thing) else id(thing)
    if key in seen:
        return 0
    seen.add(key)
    if torch.is_tensor(thing):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, dict):
        return sum(held_bytes(part, seen) for part in thing.values())
    if isinstance(thing, list | tuple):
        return sum(held_bytes(part, seen) for part in thing)
    return held_bytes(vars(thing), seen) if hasattr(thing, "__dict__") else 0


@pytest.mark.parametrize("bits", [None, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formula_equals_what_a_cache_holds(bits, dtype):
    base = base_model("Llama", max_position_embeddings=8192)
    model = compressed(base, truncated(9), rank=9, window=32, sinks=4, bits=bits, group=16).to(dtype)
    cache = CSKVCache(model.config)
    with torch.no_grad():
        for ids in torch.randint(3, 97, (1, 4096)).split([4000, *[1] * 96], dim=1):
            model(ids, use_cache=True, **{CACHE: cache})
    shape = Shape(channels=32, dtype_bytes=dtype.itemsize)
    expected = cache_bytes(shape, Layout(**model.config.cskv), 4096)
    assert held_bytes(cache) == pytest.approx(expected, rel=0.002)
    assert base_bytes(shape, Layout(**model.config.cskv), 4096) == 4 * 4096 * 2 * 32 * dtype.itemsize


@pytest.mark.parametrize("family, copies", [("Falcon:new", 2), ("Falcon", 1), ("GPTNeoX", 1), ("Llava", 1)])
def test_the_shape_is_that_of_the_base_cache(family, copies):
    model = base_model(family)
    layout, shape = Layout(**compressed(model).config.cskv), shape_of(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(3, 90, (1, 50)), use_cache=True, **{CACHE: cache})
    assert shape.copies == copies
    assert base_bytes(shape, layout, 50) == sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def test_bytes_per_token_is_the_slope():
    layout = Layout(
        window=32, sinks=4, rank_k=(96,), rank_v=(96,), bits_k=(3,), bits_v=(3,), clip_k=(1,), clip_v=(1,), group=32
    )
    assert bytes_per_token(Shape(192, 2), layout) == 96 * (12 + 4) / 32 + (36 + 4) + 4
