"""A cache with packed history reads what `Quantizer.round_trip` says, and nothing else differs."""

import copy

import pytest
import torch

from cskv_cli.modeling.cskv_quantizer import Quantizer
from tests.families import base_model, compressed, truncated
from tests.modeling.decoding import GROUP, RANK, WINDOW, base, close, cskv, decode, new_cache, padding, run, tokens
from tests.modeling.reference import reference_logits
from tests.modeling.test_generate import LOOKUP, PROMPT, generate, other_model


def double(**settings):
    """In float64, lest the noise of float32 round a number to another code than in the reference."""
    return copy.deepcopy(cskv("Llama", "low", **settings)).double()


def quantizers(bits, group=GROUP):
    return Quantizer(bits, group, per_channel=True), Quantizer(bits, group, per_channel=False)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group, window, sinks, prompt", [(4, 8, 2, 10), (8, 8, 3, 1), (3, 4, 0, 7), (5, 6, 8, 2)])
def test_decoding_equals_the_reference(bits, group, window, sinks, prompt):
    model = double(bits=bits, group=group, window=window, sinks=sinks)
    ids = tokens(1, 24)
    got = decode(model, ids, [prompt] + [1] * (24 - prompt))[0]
    close(got, reference_logits(model, ids[0], prompt, quantizers(bits, group)))
    if bits == 2:  # that would also fail if nothing were quantized
        assert (got - reference_logits(model, ids[0], prompt)).abs().max() > 0.1


@pytest.mark.parametrize("bits", [3, 4])
def test_padding_only_moves_the_borders_of_groups(bits):
    model, starts, length, prompt = double(bits=bits), [0, 3, 8, 6], 26, 10
    ids, mask = tokens(4, length), padding(starts, length)
    batch = decode(model, ids, [prompt] + [1] * (length - prompt), mask=mask)
    for row, start in enumerate(starts):
        alone = reference_logits(model, ids[row, start:], prompt - start, quantizers(bits), pad=start)
        close(batch[row, start:], alone)


def test_only_keys_or_only_values_are_packed():
    for name in "kv":
        model = double(bits=2)
        model.config.cskv[f"bits_{name}"] = [None] * 4
        used = [None if each == name else quantizer for each, quantizer in zip("kv", quantizers(2), strict=True)]
        ids, cache = tokens(1, 22), new_cache(model)
        close(decode(model, ids, [9] + [1] * 13, cache)[0], reference_logits(model, ids[0], 9, used))


@pytest.mark.parametrize("plain", [("k", 0), ("v", 3)])
def test_crop_is_refused_by_all_layers_and_branches_or_by_none(plain):
    model, (name, layer) = copy.deepcopy(cskv("Llama", "low", bits=2)), plain
    model.config.cskv["bits_v"][0] = model.config.cskv[f"bits_{name}"][layer] = None
    cache = new_cache(model)
    decode(model, tokens(1, 22), [9] + [1] * 13, cache)
    before = decode_state(cache)
    with pytest.raises(ValueError, match="Crop to 16"):
        cache.crop(-5)
    assert cache.get_seq_length() == 22 and all(map(torch.equal, decode_state(cache), before))


def decode_state(cache):
    """Keys, values and latents of all layers, as attention reads them."""
    state = []
    for layer in cache.layers:
        state += [layer.keys.clone(), layer.values.clone(), *(store.first(len(store)) for store in layer.latents)]
    return state


def test_crop_to_the_border_of_a_group():
    model, ids = cskv("Llama", "low", bits=4), tokens(2, 22)
    cache, shorter = new_cache(model), new_cache(model)
    decode(model, ids, [12] + [1] * 10, cache)
    decode(model, ids[:, :16], [12] + [1] * 4, shorter)
    with pytest.raises(ValueError, match="to 17 tokens.*Crop to 16"):
        cache.crop(-5)
    cache.crop(-6)
    assert cache.get_seq_length() == 16
    for got, expected in zip(cache.layers, shorter.layers, strict=True):
        held = got.keys.shape[2]
        assert held == WINDOW - 6  # those that had left the window stay rebuilt
        close(got.keys, expected.keys[:, :, -held:])
        for store, other in zip(got.latents, expected.latents, strict=True):
            assert torch.equal(store.first(16), other.first(16)) and store.recent.shape[1] == 0
    assert decode(model, ids[:, 16:], [1] * 6, cache).isfinite().all()


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_assisted_decoding_says_the_same(how):
    model = cskv("Llama", bits=8)
    settings = {"prompt lookup": LOOKUP, "assistant": dict(assistant_model=other_model(model))}
    expected, _ = generate(model, PROMPT[:1], max_new_tokens=40)
    got, cache = generate(model, PROMPT[:1], max_new_tokens=40, **settings[how])
    assert torch.equal(got, expected)
    assert cache.layers[0].latents[0].quantized_tokens > 40


def test_beams_equal_those_of_the_base_at_full_rank():
    mask = padding([4, 0], 14)
    got, expected = (
        generate(model, PROMPT * mask, attention_mask=mask, num_beams=3)[0]
        for model in (cskv("Llama", bits=8), base("Llama"))
    )
    assert torch.equal(got, expected)


def test_huge_key_biases_are_never_quantized():
    settings = dict(factors=truncated(RANK), rank=RANK, window=WINDOW, sinks=2, group=GROUP)
    errors, ids, sizes = [], tokens(2, 40), [14] + [1] * 26
    for scale in (1, 500):
        model = base_model("Qwen2")
        with torch.no_grad():
            for layer in (model.model.layers[0], model.model.layers[-1]):
                layer.self_attn.k_proj.bias.mul_(scale)
        plain, four, eight = (compressed(model, bits=bits, **settings) for bits in (None, 4, 8))
        assert torch.equal(generate(eight, PROMPT)[0], generate(plain, PROMPT)[0])
        errors.append((decode(four, ids, sizes) - decode(plain, ids, sizes)).abs().mean())
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(dtype):
    model = copy.deepcopy(cskv("Llama", "low", bits=4)).to(dtype)
    cache = new_cache(model)
    logits = decode(model, tokens(2, 20), [10] + [1] * 10, cache)
    assert logits.dtype == dtype and logits.isfinite().all()
    store = cache.layers[0].latents[0]
    assert store.packed.minimum.dtype == dtype and store.first(20).dtype == dtype
    expected = decode(cskv("Llama", "low", bits=4), tokens(2, 20), [10] + [1] * 10)
    assert (logits - expected).abs().mean() < 16 * torch.finfo(dtype).eps * expected.abs().mean()


def test_one_forward_of_many_tokens_packs_them_all():
    model, ids = cskv("Llama", "low", bits=4), tokens(2, 22)
    cache = new_cache(model)
    with torch.no_grad():
        run(model, ids, cache)
    store = cache.layers[-1].latents[1]
    assert store.quantized_tokens == 20 and store.recent.shape == (2, 2, RANK)
