"""Decode simulation equals decoding, token by token, through the real cache."""

import pytest
import torch

from cskv_cli.evaluation import methods
from cskv_cli.evaluation.perplexity import compare
from cskv_cli.evaluation.simulation import decode_simulation, simulation_mask
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.modeling_cskv import CACHE
from tests.families import base_model, compressed, truncated

IDS = torch.randint(3, 97, (1, 41), generator=torch.Generator().manual_seed(5))


def token_by_token(model, ids):
    """The logits of a loop that gives the model one token at a time."""
    cache = CSKVCache(model.config)
    steps = [model(ids[:, i : i + 1], use_cache=True, **{CACHE: cache}).logits for i in range(ids.shape[1])]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("bits", [None, 2, 4])
@pytest.mark.parametrize("window, sinks", [(8, 0), (8, 3), (16, 1), (64, 2)])
@pytest.mark.parametrize("family", ["Llama:bias", "Qwen3", "Gemma2", "Llama:yarn"])
def test_simulation_equals_the_real_loop(family, window, sinks, bits):
    base = base_model(family)
    model = compressed(base, truncated(9), rank=9, window=window, sinks=sinks, bits=bits, group=8)
    model.double()  # in float32 a code may fall the other way by rounding noise
    with torch.no_grad(), decode_simulation(model):
        simulated = model(IDS, use_cache=False).logits
    with torch.no_grad():
        expected = token_by_token(model, IDS)
        plain = model(IDS, use_cache=False).logits
    torch.testing.assert_close(simulated, expected, atol=1e-5, rtol=1e-5)
    if window < 64:
        assert (simulated - plain).abs().max() > 1e-2  # a plain forward never reads the compressed history


def test_attention_sinks_of_the_model_are_counted_once():
    model = compressed(base_model("GptOss"), truncated(9), rank=9, window=8, sinks=3)
    with torch.no_grad():
        expected = token_by_token(model, IDS)
        with decode_simulation(model):
            torch.testing.assert_close(model(IDS, use_cache=False).logits, expected, atol=2e-4, rtol=2e-4)


def test_the_hooks_are_gone_afterwards():
    base = base_model("Llama")
    model = compressed(base, truncated(4), rank=4)
    with torch.no_grad():
        with decode_simulation(model):
            pass
        assert torch.equal(model(IDS, use_cache=False).logits, base(IDS, use_cache=False).logits)


def test_mask_counts_every_key_once():
    seen = simulation_mask(12, window=3, sinks=2)[0, 0] == 0
    exact, rebuilt = seen[:, :12], seen[:, 12:]
    assert torch.equal(exact ^ rebuilt, torch.ones(12, 12).tril().bool())
    for query in range(12):
        expected = {j for j in range(query + 1) if j > query - 3 or j < 2}
        assert set(exact[query].nonzero().flatten().tolist()) == expected


def test_perplexity_and_kl_against_their_definitions():
    model = compressed(base_model("Llama"), truncated(6), rank=6)
    ids = torch.cat([IDS, IDS.flip(1)])
    (comparison,) = compare([methods.cskv(model)], ids)
    summary = comparison.summary()
    with torch.no_grad():
        base = model(ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)
        with decode_simulation(model):
            cskv = model(ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    for name, logs in (("base", base), ("cskv", cskv)):
        nll = torch.nn.functional.nll_loss(logs.flatten(0, 1), ids[:, 1:].flatten())
        assert summary[name]["perplexity"] == pytest.approx(nll.exp().item(), rel=1e-4)
    kl = torch.nn.functional.kl_div(cskv, base, log_target=True, reduction="none").sum(-1).mean()
    assert summary["kl"] == pytest.approx(kl.item(), rel=1e-3)
    assert summary["tokens"] == 80
    assert summary["top1_agreement"] == pytest.approx((base.argmax(-1) == cskv.argmax(-1)).float().mean().item())
