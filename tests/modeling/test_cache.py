"""The cache gives attention what DESIGN says, however the tokens came in and whatever was done to the cache."""

import copy

import pytest
import torch
from torch import nn

from cskv_cli.modeling.cskv_latents import BLOCK
from tests.modeling.decoding import (
    GROUP,
    RANK,
    SINKS,
    WINDOW,
    base,
    close,
    cskv,
    decode,
    held_bytes,
    held_tensors,
    latent_bytes,
    new_cache,
    padding,
    reachable,
    run,
    tokens,
    waiting,
)
from tests.modeling.reference import reference_logits

FEW_FAMILIES = ["Llama", "Qwen3", "Gemma3", "Llama:dynamic", "Llama:bias"]
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3]


def splits(length):
    """Ways to cut so many tokens into forwards."""
    turn = (length + 1) // 2
    yield [length]
    yield [1] * length
    yield [3] * (length // 3) + [length % 3] * (length % 3 > 0)
    if length > 3:
        yield [turn, 1, length - turn - 1]  # a turn, a token, the next turn


# At full rank: the base model


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_any_split_equals_base(family, length):
    ids = tokens(2, length)
    for sizes in splits(length):
        close(decode(cskv(family), ids, sizes), decode(base(family), ids, sizes))


@pytest.mark.parametrize("family", ["Llama:dynamic", "Llama:longrope"])
def test_rotations_that_change_with_the_length_equal_base(family):
    ids, sizes = tokens(2, 5 * WINDOW), [5] + [1] * (5 * WINDOW - 5)
    close(decode(cskv(family), ids, sizes), decode(base(family), ids, sizes))


@pytest.mark.parametrize("starts", [[0, 3, 5], [6, 0, 1]])
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_any_split_of_a_padded_batch_equals_base(family, starts):
    length = 2 * WINDOW + 3
    ids, mask = tokens(3, length), padding(starts, length)
    for sizes in splits(length):  # with chunks of 3, some rows begin with nothing but padding
        got, expected = (decode(model, ids, sizes, mask=mask) for model in (cskv(family), base(family)))
        close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("window, sinks", [(1, 0), (2, 9), (40, 3), (4, 0)])
def test_any_window_and_sinks_equal_base(window, sinks):
    ids = tokens(2, 19)
    for sizes in splits(19):
        got = decode(cskv("Llama", window=window, sinks=sinks), ids, sizes)
        close(got, decode(base("Llama"), ids, sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_equal_base(dtype):
    ids, sizes = tokens(2, 19), [10] + [1] * 9
    got, expected = (decode(copy.deepcopy(model).to(dtype), ids, sizes) for model in (cskv("Qwen3"), base("Qwen3")))
    assert got.dtype == dtype
    close(got, expected, tolerance=20 * torch.finfo(dtype).eps)


def test_training_without_a_cache_is_training_the_base():
    ids, losses = tokens(2, 12), []
    for model in (copy.deepcopy(cskv("Llama", "low")), copy.deepcopy(base("Llama"))):
        output = model.train()(ids, labels=ids, use_cache=False)
        output.loss.backward()
        assert output.past_key_values is None
        losses.append((output.loss, model.model.layers[0].self_attn.k_proj.weight.grad))
    assert torch.equal(losses[0][0], losses[1][0]) and torch.equal(losses[0][1], losses[1][1])


def test_gradients_flow_through_the_cache():
    model, ids = copy.deepcopy(cskv("Llama", "low")), tokens(1, 14)
    cache = new_cache(model)
    for size in [10, 1, 1, 1, 1]:
        ids, chunk = ids[:, size:], ids[:, :size]
        logits = run(model, chunk, cache)
    logits.square().sum().backward()
    assert model.model.layers[0].self_attn.k_up.weight.grad.abs().sum() > 0


# At low rank: the independent reference, and each row alone


@pytest.mark.parametrize(
    "window, sinks, prompt", [(8, 2, 1), (8, 2, 7), (8, 2, 8), (8, 2, 9), (4, 0, 12), (1, 1, 5), (3, 6, 2), (40, 2, 6)]
)
def test_decoding_equals_the_reference(window, sinks, prompt):
    model, ids = cskv("Llama", "low", window=window, sinks=sinks), tokens(1, 22)
    expected = reference_logits(model, ids[0], prompt)
    close(decode(model, ids, [prompt] + [1] * (22 - prompt))[0], expected)
    exact = decode(base("Llama"), ids, [22])[0]
    assert (expected - exact).abs().max() > 0.1 or window == 40  # the reference is no trivial one


@pytest.mark.parametrize("family", FEW_FAMILIES[:3] + ["Llama:bias"])
def test_a_padded_row_decodes_as_if_it_were_alone(family):
    model, starts, length, prompt = cskv(family, "low"), [0, 3, 9, 5], 24, 10
    ids, mask = tokens(4, length), padding(starts, length)
    batch = decode(model, ids, [prompt] + [1] * (length - prompt), mask=mask)
    for row, start in enumerate(starts):
        alone = decode(model, ids[row : row + 1, start:], [prompt - start] + [1] * (length - prompt))
        close(batch[row, start:], alone[0])


def test_sinks_of_a_row_whose_first_chunk_is_padding():
    model, starts, length = cskv("Llama", "low"), [0, 6], 24
    ids, mask = tokens(2, length), padding(starts, length)
    sizes = [4, 6] + [1] * (length - 10)
    batch, alone = decode(model, ids, sizes, mask=mask)[1, 6:], decode(model, ids[1:, 6:], [4] + [1] * (length - 10))
    close(batch, alone[0])


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_a_mask_of_four_dimensions_says_the_same(kind):
    model, length, prompt = cskv("Llama", "low"), 20, 10
    ids, mask, cache = tokens(2, length), padding([0, 5], length), new_cache(cskv("Llama"))
    sizes = [prompt] + [1] * (length - prompt)
    expected = decode(model, ids, sizes, mask=mask)
    seen = (mask[:, None, None, :] * torch.ones(length, length).tril()).bool()
    seen |= torch.eye(length).bool()  # a row of padding sees itself, since a softmax over nothing is NaN
    positions, got = (mask.cumsum(-1) - 1).clamp(min=0), []
    for stop in range(prompt, length + 1):
        start = stop - 1 if got else 0
        four = seen[:, :, start:stop, :stop]
        if kind == "float":
            four = torch.where(four, 0.0, torch.finfo(torch.float32).min)
        with torch.no_grad():
            got.append(run(model, ids[:, start:stop], cache, four, position_ids=positions[:, start:stop]))
    close(torch.cat(got, dim=1)[mask.bool()], expected[mask.bool()])


# Memory


@pytest.mark.parametrize("setting", ["low", "low, 4 bit", "low, 3 bit"])
def test_bytes_held_after_4096_tokens(setting):
    """To the byte, room for the tokens to come included; and nowhere a copy of the history in floats."""
    model, ids, channels = cskv("Llama", setting), tokens(1, 4102), 32
    cache = new_cache(model)

    def formula(count, exact, wait=(0,) * 4, block=1):
        layers = 0
        for waits in wait:  # 4 layers
            room = -(count - waits) % block
            layers += latent_bytes(count - waits, setting) + 2 * room * RANK * 4
            layers += 2 * exact * channels * 4 + waits * 64 * 4
        return layers + 4 * count  # positions, once

    decode(model, ids[:, :4096], [4096], cache)
    assert held_bytes(cache) == formula(4096, WINDOW + SINKS)
    decode(model, ids[:, 4096:], [1] * 6, cache)
    wait, block = [waiting(setting, 4096, 4102, i) for i in range(4)], GROUP if "bit" in setting else BLOCK
    assert {*wait} == ({0, 1, 2} if "bit" in setting else {0, 1, 6})
    assert held_bytes(cache) == formula(4102, WINDOW + SINKS, wait, block)
    if "bit" in setting:
        scales = {id(t) for layer in cache.layers for store in layer.latents for t in store.packed[1:]}
        assert all(t.numel() < 2048 or id(t) in scales for t in held_tensors(cache) if t.is_floating_point())
    cache.crop(-4082)
    assert held_bytes(cache) == formula(20, SINKS)


def test_nothing_of_the_model_hangs_on_a_cache():
    model, cache = copy.deepcopy(cskv("Llama", "low")), new_cache(cskv("Llama", "low"))
    decode(model, tokens(1, 12), [10, 1, 1], cache)
    assert not [thing for thing in reachable(cache) if isinstance(thing, nn.Module)]
    model.model.layers[-1].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode(model, tokens(1, 1), [1], cache)
    assert not [thing for thing in reachable(cache) if isinstance(thing, nn.Module)]


def test_another_model_is_told_that_the_cache_is_not_its_own():
    with pytest.raises(ValueError, match="a CSKVCache needs its own model"):
        decode(base("Llama"), tokens(1, 1), [1], new_cache(cskv("Llama")))


def test_nothing_that_a_failed_forward_staged_hangs_on_a_cache():
    model, cache = copy.deepcopy(cskv("Llama", "low")), new_cache(cskv("Llama", "low"))
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode(model, tokens(1, 12), [12], cache)
    assert not [thing for thing in reachable(cache) if isinstance(thing, nn.Module)]
