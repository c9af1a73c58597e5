"""Decode simulation equals decoding, token by token, through the real cache."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cskv_cli.evaluation import methods, simulation
from cskv_cli.evaluation.perplexity import compare
from cskv_cli.evaluation.simulation import decode_simulation, simulation_mask
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.cskv_structure import attentions
from cskv_cli.modeling.modeling_cskv import CACHE
from tests.families import FAMILIES, base_model, compressed, truncated

IDS = torch.randint(3, 97, (1, 41), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(simulation, "BLOCK", 16)  # so that these short texts take three


def token_by_token(model, ids):
    """The logits of a loop that gives the model one token at a time."""
    cache = CSKVCache(model.config)
    steps = [model(ids[:, i : i + 1], use_cache=True, **{CACHE: cache}).logits for i in range(ids.shape[1])]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("bits", [None, 2, 4])
@pytest.mark.parametrize("window, sinks", [(8, 0), (8, 3), (16, 1), (64, 2)])
@pytest.mark.parametrize("family", ["Llama:bias", "Qwen3", "Gemma2", "Llama:yarn"])
def test_simulation_equals_the_real_loop(monkeypatch, family, window, sinks, bits):
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim))  # all in float64
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


CHANGING = "Llama:dynamic", "Llama:longrope"  # the rotation of a token depends on how many follow


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - CHANGING))
def test_every_family_is_simulated(family):
    check_simulation(compressed(base_model(family), truncated(9), rank=9, window=8, sinks=3))


@pytest.mark.parametrize("family", ["Llama", "Falcon", "GPTNeoX", "Phi", "Qwen3"])
def test_attention_may_be_eager(family):
    model = compressed(base_model(family), truncated(9), rank=9, window=8, sinks=3)
    model.set_attn_implementation("eager")
    check_simulation(model)


def check_simulation(model):
    with torch.no_grad():
        expected = token_by_token(model, IDS)
        with decode_simulation(model):
            torch.testing.assert_close(model(IDS, use_cache=False).logits, expected, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(expected, model(IDS, use_cache=False).logits, atol=1e-2)  # the factors do lose something


def test_a_query_meets_only_keys_that_its_block_sees(monkeypatch):
    model, seen = compressed(base_model("Llama"), truncated(9), rank=9, window=8, sinks=3), []
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(attention, query, key, *args, **kwargs):
        seen.append((query.shape[2], key.shape[2]))
        return plain(attention, query, key, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", watched)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), decode_simulation(model, prefill=17):
        model(IDS, use_cache=False)
    # exact: all in the prefill, then the sinks and the window of the first query; rebuilt: what has left the last one's
    blocks = [(16, 16), (16, 32 + (31 - 8 + 1 - 3)), (9, 3 + 8 + 8 + (40 - 8 + 1 - 3))]
    assert seen == blocks * len(model.model.layers)


def test_the_model_is_afterwards_what_it_was():
    base = base_model("Llama")
    model = compressed(base, truncated(4), rank=4)
    configs = [attention.config for attention in attentions(model)]
    with torch.no_grad():
        with decode_simulation(model):
            model(IDS, use_cache=False)
        assert torch.equal(model(IDS, use_cache=False).logits, base(IDS, use_cache=False).logits)
    for attention, config in zip(attentions(model), configs, strict=True):
        assert attention.config is config and not hasattr(attention, "step")


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
