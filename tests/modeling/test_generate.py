"""`generate` with a CSKV cache, at full rank: what it says is what the base model says."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from cskv_cli.modeling.modeling_cskv import CACHE, CSKVCache
from tests.modeling.decoding import SETTINGS, WINDOW, base, cskv, padding, tokens

PROMPT = tokens(2, 14, seed=5)
LOOKUP = dict(prompt_lookup_num_tokens=3, eos_token_id=1)  # transformers 4.57 wants one; here it never comes
GENERATE = {
    "greedy": dict(),
    "beams": dict(num_beams=3),
    "sampled": dict(do_sample=True, temperature=0.8),
    "sequences": dict(do_sample=True, num_return_sequences=3),
    "sampled beams": dict(do_sample=True, num_beams=2, num_return_sequences=2),
    "prompt lookup": LOOKUP,
    "prefill in chunks": dict(prefill_chunk_size=5),
    "no cache": dict(use_cache=False),
}


def generate(model, ids, **kwargs):
    torch.manual_seed(3)
    settings = dict(max_new_tokens=14, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    output = model.generate(ids, attention_mask=mask, **settings | kwargs)
    return output.sequences, output.get("cache", output.get("past_key_values"))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(  # transformers 4.57 cannot crop the sliding-window layers of Gemma3
    "family, how",
    [("Llama", how) for how in GENERATE] + [("Gemma3", how) for how in GENERATE if how != "prompt lookup"],
)
def test_generate_equals_base(family, how, padded):
    ids = PROMPT[:1] if how == "prompt lookup" else PROMPT
    mask = padding([5, 0], 14)[: len(ids)] if padded else torch.ones_like(ids)
    got, cache = generate(cskv(family), ids * mask, attention_mask=mask, **GENERATE[how])
    expected, _ = generate(base(family), ids * mask, attention_mask=mask, **GENERATE[how])
    assert torch.equal(got, expected)
    assert isinstance(cache, CSKVCache) or how == "no cache"


def other_model(model):
    """A model whose drafts are often, not always, what `model` would say."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in other.model.layers:
            weight = layer.mlp.down_proj.weight
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return other


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_assistant_both_ways(family, setting):
    expected, _ = generate(base(family), PROMPT[:1], max_new_tokens=24)
    helped, _ = generate(
        base(family), PROMPT[:1], max_new_tokens=24, assistant_model=other_model(cskv(family, setting))
    )
    assert torch.equal(helped, expected)
    if setting == "full":
        got, _ = generate(cskv(family), PROMPT[:1], max_new_tokens=24, assistant_model=other_model(base(family)))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("first", ["plain", "prompt lookup", "assistant"])
def test_turns_on_the_returned_cache(first):
    how = {"prompt lookup": LOOKUP, "assistant": dict(assistant_model=other_model(base("Llama")))}
    got, cache = generate(cskv("Llama"), PROMPT[:1], **how.get(first, {}))
    expected, _ = generate(base("Llama"), PROMPT[:1])
    for turn in range(2):
        more = tokens(1, 5, seed=turn)
        got, cache = generate(cskv("Llama"), torch.cat([got, more], dim=1), **{CACHE: cache})
        expected, _ = generate(base("Llama"), torch.cat([expected, more], dim=1))
        assert torch.equal(got, expected)
        assert all(layer.keys.shape[2] == WINDOW for layer in cache.layers)


def test_a_cache_that_was_asked_for_stays():
    expected, _ = generate(base("Llama"), PROMPT)
    got, cache = generate(cskv("Llama", "low"), PROMPT, cache_implementation="static", disable_compile=True)
    assert torch.equal(got, expected) and isinstance(cache, StaticCache)
    given = DynamicCache(config=base("Llama").config)
    got, cache = generate(cskv("Llama", "low"), PROMPT, **{CACHE: given})
    assert torch.equal(got, expected) and cache is given
