"""The cache gives attention what DESIGN says, however the tokens came in and whatever was done to the cache."""

import copy

import pytest
import torch
from torch import nn

from cskv_cli.modeling.cskv_latents import BLOCK
from cskv_cli.modeling.modeling_cskv import CSKVCache
from tests.modeling.decoding import (
    GROUP,
    RANK,
    SETTINGS,
    SINKS,
    WINDOW,
    base,
    cskv,
    decode,
    held_bytes,
    held_tensors,
    new_cache,
    padding,
    reachable,
    run,
    tokens,
)
from tests.modeling.reference import reference_logits

FEW_FAMILIES = ["Llama", "Qwen3", "Gemma3", "Llama:dynamic", "Llama:bias"]
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3]


def close(got, expected, tolerance=1e-4):
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


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


# What is done to a cache: each row goes on as it would have without


OPERATIONS = {
    "deepcopy": ([0, 1, 2], copy.deepcopy),
    "reorder": ([2, 0, 0], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0]))),
    "repeat": ([0, 0, 1, 1, 2, 2], lambda cache: cache.batch_repeat_interleave(2)),
    "select": ([2, 0], lambda cache: cache.batch_select_indices(torch.tensor([2, 0]))),
    "offload": ([0, 1, 2], lambda cache: [layer.offload() or layer.prefetch() for layer in cache.layers]),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "family, setting",
    [("Llama", "full"), ("Llama", "low"), ("Llama", "low, 4 bit"), ("Gemma3", "low, 3 bit"), ("Llama:dynamic", "low")],
)
def test_rows_go_on_after(family, setting, operation, padded):
    model, prompt, length = cskv(family, setting), 19, 25
    ids, mask = tokens(3, length), padding([0, 3, 6], length) if padded else None
    rows, act = OPERATIONS[operation]
    cache = new_cache(model)
    decode(model, ids[:, :prompt], [12] + [1] * (prompt - 12), cache, mask)
    changed = act(cache)
    cache = changed if isinstance(changed, CSKVCache) else cache
    got = decode(model, ids[rows, prompt:], [1] * (length - prompt), cache, None if mask is None else mask[rows])
    untouched = decode(model, ids, [12] + [1] * (length - 12), mask=mask)
    close(got, untouched[rows, prompt:])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_know_their_padding_without_another_mask(operation):
    model, ids = cskv("Llama", "low, 4 bit"), tokens(3, 22)
    rows, act = OPERATIONS[operation]
    logits = []
    for operate in (False, True):
        cache = new_cache(model)
        decode(model, ids[:, :14], [12, 1, 1], cache, padding([0, 3, 6], 14))
        changed = act(cache) if operate else None
        cache = changed if isinstance(changed, CSKVCache) else cache
        logits.append(decode(model, ids[rows if operate else [0, 1, 2], 14:], [1] * 8, cache))
    close(logits[1], logits[0][rows])


def test_one_row_of_positions_meets_many():
    """A batch without a mask shares one row of positions; a later forward may bring a row for each."""
    model, ids = cskv("Llama", "low"), tokens(2, 20)
    expected, cache = decode(model, ids, [10] + [1] * 10), new_cache(model)
    decode(model, ids[:, :12], [10, 1, 1], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = decode(model, ids[[1, 0], 12:], [1] * 8, cache, mask=torch.ones(2, 20, dtype=torch.long))
    close(got, expected[[1, 0], 12:])


@pytest.mark.parametrize("family, setting", [*(("Llama", setting) for setting in SETTINGS), ("Gemma3", "low")])
def test_reset_then_another_prompt(family, setting):
    model, ids = cskv(family, setting), tokens(2, 15)
    expected, cache = decode(model, ids, [10] + [1] * 5), new_cache(model)
    decode(model, tokens(3, 15, seed=1), [10] + [1] * 5, cache, padding([0, 4, 7], 15))
    cache.reset()
    assert cache.get_seq_length() == 0 and held_bytes(cache) == held_bytes(new_cache(model))
    assert torch.equal(decode(model, ids, [10] + [1] * 5, cache), expected)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_cropped_to_nothing_then_another_prompt(family):
    model, ids = cskv(family, "low"), tokens(2, 15)
    expected, cache = decode(model, ids, [10] + [1] * 5), new_cache(model)
    decode(model, tokens(3, 10, seed=1), [10], cache, padding([0, 4, 7], 10))
    cache.crop(-10)
    assert torch.equal(decode(model, ids, [10] + [1] * 5, cache), expected)


@pytest.mark.parametrize("removed", [1, 3, WINDOW, 15])
def test_crop_equals_base_at_full_rank(removed):
    ids, other, logits = tokens(2, 20), tokens(2, 6, seed=1), []
    for model in (cskv("Llama"), base("Llama")):
        cache = new_cache(model)
        decode(model, ids, [15] + [1] * 5, cache)
        cache.crop(-removed)
        assert cache.get_seq_length() == 20 - removed
        logits.append(decode(model, other, [1] * 6, cache))
    close(*logits)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("family", ["Qwen2:swa", "Gemma3"])
def test_what_a_sliding_window_cannot_give_back_is_kept_by_all_layers(family, recorded):
    model, ids = cskv(family), tokens(2, 20)  # Qwen2's compressed layers come first
    cache, fresh = new_cache(model), new_cache(model)
    for each in (cache, fresh):
        decode(model, ids[:, :12], [10, 1, 1], each)
    if recorded:  # too late
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="cannot crop this cache to 9 tokens: a layer keeps 8 of 12"):
        cache.crop(-3)
    close(decode(model, ids[:, 12:], [1] * 8, cache), decode(model, ids[:, 12:], [1] * 8, fresh))


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_past_that_was_recorded_for_generate_is_let_go_of(family):
    model, ids = cskv(family), tokens(2, 20)
    cache = new_cache(model)
    cache.record_past_for_generate(True)
    cache.record_past_for_generate(False)  # with nothing there
    cache.record_past_for_generate(True)
    decode(model, ids[:, :14], [12, 1, 1], cache)
    cache.record_past_for_generate(False)
    assert all(layer.keys.shape[2] <= WINDOW for layer in cache.layers)
    close(decode(model, ids[:, 14:], [1] * 6, cache), decode(base(family), ids, [20])[:, 14:])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sizes", [[5], [1, 1, 1, 1, 1]])
def test_crop_of_a_recorded_past_is_exact(setting, sizes):
    model, ids, other = cskv("Llama", setting), tokens(2, 18), tokens(2, 5, seed=1)
    cache, fresh = new_cache(model), new_cache(model)
    for each in (cache, fresh):
        decode(model, ids, [14] + [1] * 4, each)
    cache.activate_past_recording()
    decode(model, other, sizes, cache)
    cache.crop(-5)
    assert held_bytes(cache) <= held_bytes(fresh)
    cache.crop(0)
    for layer in cache.layers:
        layer.record_past = False
    last = tokens(2, 6, seed=2)
    assert torch.equal(decode(model, last, [1] * 6, cache), decode(model, last, [1] * 6, fresh))


def test_length_to_keep_is_understood_as_before_transformers_5():
    model = cskv("Llama", "low")
    cache = new_cache(model)
    decode(model, tokens(1, 10), [10], cache)
    cache.crop(12)
    assert cache.get_seq_length() == 10
    cache.crop(7)
    assert cache.get_seq_length() == 7


# Memory


def latent_bytes(count, setting):
    """Bytes of the latents of `count` tokens in one layer, keys and values."""
    bits = SETTINGS[setting].get("bits")
    if bits is None:
        return 2 * count * RANK * 4
    full, rest = count // GROUP * GROUP, count % GROUP
    keys = full // GROUP * RANK * (-(-GROUP * bits // 8) + 4)
    values = full * (-(-RANK * bits // 8) + 4)
    return keys + values + 2 * rest * RANK * 4


@pytest.mark.parametrize("setting", ["low", "low, 4 bit", "low, 3 bit"])
def test_bytes_held_after_4096_tokens(setting):
    """To the byte, room for the tokens to come included; and nowhere a copy of the history in floats."""
    model, ids, channels = cskv("Llama", setting), tokens(1, 4102), 32
    cache = new_cache(model)

    def formula(count, exact, room=0):
        layer = latent_bytes(count, setting) + 2 * exact * channels * 4 + 2 * room * RANK * 4
        return 4 * layer + 4 * count  # 4 layers; positions, once

    decode(model, ids[:, :4096], [4096], cache)
    assert held_bytes(cache) == formula(4096, WINDOW + SINKS)
    decode(model, ids[:, 4096:], [1] * 6, cache)
    room = -4102 % (GROUP if "bit" in setting else BLOCK)
    assert held_bytes(cache) == formula(4102, WINDOW + SINKS, room)
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
