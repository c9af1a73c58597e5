"""`torch.compile` of a CSKV model: the same numbers; all but the attention to a CSKV cache is compiled, once."""

import pytest
import torch
from torch._dynamo.config import patch
from torch._dynamo.utils import counters

from cskv_cli.modeling.modeling_cskv import CACHE
from tests.modeling.decoding import cskv, new_cache, tokens

IDS = tokens(1, 40, seed=1)


@pytest.fixture
def compiled():
    """Compiles by tracing alone (Dynamo): what a compiler would be given, run as it is."""
    torch._dynamo.reset()
    counters.clear()
    with patch(fail_on_recompile_limit_hit=True):  # or it would go on uncompiled
        yield lambda model, **kwargs: torch.compile(model, backend="eager", **kwargs)
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("setting", ["full", "low, 4 bit"])
def test_a_decode_step_is_compiled_once_and_equals_eager(compiled, setting):
    model = cskv("Llama", setting)
    step, caches, traced = compiled(model), (new_cache(model), new_cache(model)), []
    for cache in caches:
        model(IDS[:, :16], **{CACHE: cache})
    for i in range(16, IDS.shape[1]):
        expected, got = (run(IDS[:, i : i + 1], **{CACHE: c}) for run, c in zip((model, step), caches, strict=True))
        assert torch.equal(got.logits, expected.logits)
        traced.append(counters["frames"]["total"])
    assert traced[8] == traced[-1] and counters["stats"]["unique_graphs"] > 1


@torch.no_grad()
def test_without_a_cache_it_is_one_graph(compiled):
    model = cskv("Llama")
    got = compiled(model, fullgraph=True)(IDS, use_cache=False).logits
    torch.testing.assert_close(got, model(IDS, use_cache=False).logits)
    assert counters["stats"]["unique_graphs"] == 1
