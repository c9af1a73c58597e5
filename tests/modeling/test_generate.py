"""`generate` with a CSKV cache, at full rank: what it says is what the base model says."""

import contextlib
import copy

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

from cskv_cli.modeling.modeling_cskv import CACHE, CSKVCache, CSKVLayer
from tests.modeling.decoding import SETTINGS, WINDOW, base, cskv, padding, tokens

PROMPT = tokens(2, 14, seed=5)
LOOKUP = dict(prompt_lookup_num_tokens=3, eos_token_id=1)  # transformers 4.57 wants one; here it never comes


@torch.no_grad()
def contrastive(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """Contrastive search (arXiv 2202.06417): a loop of one's own, on the cache that `generate` hands to it.

    Each of the 3 likeliest tokens is tried on the cache; the one least like what is there already goes on.
    """
    count, weight, ids = 3, 0.4, input_ids
    mask, cache = kwargs["attention_mask"], kwargs[CACHE]
    mask = torch.ones_like(ids) if mask is None else mask

    def forward(new, mask):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
        kwargs = {CACHE: cache, "attention_mask": mask, "position_ids": positions, "output_hidden_states": True}
        output = model(new, **kwargs)
        return output.logits[:, -1].softmax(-1), output.hidden_states[-1]

    likely, context = forward(ids, mask)
    while not stopping_criteria(ids, None).all():
        best = likely.topk(count)
        cache.batch_repeat_interleave(count)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        likely, hidden = forward(best.indices.view(-1, 1), mask.repeat_interleave(count, dim=0))
        alike = torch.cosine_similarity(context.repeat_interleave(count, dim=0), hidden, dim=-1).amax(-1)
        chosen = ((1 - weight) * best.values - weight * alike.view(-1, count)).argmax(-1)
        rows = torch.arange(len(ids)) * count + chosen
        cache.batch_select_indices(rows)
        likely, context = likely[rows], torch.cat([context, hidden[rows]], dim=1)
        ids = torch.cat([ids, best.indices.gather(1, chosen[:, None])], dim=1)
    return GenerateDecoderOnlyOutput(sequences=ids, **{CACHE: cache})


GENERATE = {
    "greedy": dict(),
    "beams": dict(num_beams=3),
    "sampled": dict(do_sample=True, temperature=0.8),
    "sequences": dict(do_sample=True, num_return_sequences=3),
    "sampled beams": dict(do_sample=True, num_beams=2, num_return_sequences=2),
    "prompt lookup": LOOKUP,
    "prefill in chunks": dict(prefill_chunk_size=5),
    "no cache": dict(use_cache=False),
    "contrastive": dict(custom_generate=contrastive),
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


@pytest.mark.parametrize(
    "kind, asked",
    [
        (StaticCache, dict(cache_implementation="static", disable_compile=True)),
        (QuantizedCache, dict(cache_implementation="quantized", cache_config={"backend": "fp8"})),
    ],
)
def test_a_cache_that_was_asked_for_stays(kind, asked):
    expected, _ = generate(base("Llama"), PROMPT, **asked)
    got, cache = generate(cskv("Llama", "low"), PROMPT, **asked)
    assert torch.equal(got, expected) and isinstance(cache, kind)


def test_a_cache_that_was_given_stays():
    expected, _ = generate(base("Llama"), PROMPT)
    given = DynamicCache(config=base("Llama").config)
    got, cache = generate(cskv("Llama", "low"), PROMPT, **{CACHE: given})
    assert torch.equal(got, expected) and cache is given


class Stream(contextlib.nullcontext):
    """A stream of a device that does everything at once."""

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_offloaded_cache_is_offloaded_layer_by_layer(setting, monkeypatch):
    expected, _ = generate(cskv("Llama", setting), PROMPT)
    moves = []
    if torch.cuda.is_available():
        model, ids = copy.deepcopy(cskv("Llama", setting)).to("cuda"), PROMPT.to("cuda")
    else:  # transformers asks for the streams of a CUDA device
        model, ids = cskv("Llama", setting), PROMPT
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
        monkeypatch.setattr(torch, "Stream", Stream)
    for move in ("offload", "prefetch"):
        plain = getattr(CSKVLayer, move)
        monkeypatch.setattr(CSKVLayer, move, lambda self, m=move, plain=plain: (moves.append((m, self)), plain(self)))
    got, cache = generate(model, ids, cache_implementation="offloaded")
    assert torch.equal(got.cpu(), expected) and isinstance(cache, CSKVCache) and cache.offloading
    layers, steps = cache.layers, 14  # a prefill and 13 tokens
    assert [layer for move, layer in moves if move == "offload"] == layers * steps
    assert [layer for move, layer in moves if move == "prefetch"] == (layers[1:] + layers[:1]) * steps
