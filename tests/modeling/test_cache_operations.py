"""What is done to a cache: each row goes on as it would have without."""

import copy

import pytest
import torch

from cskv_cli.modeling.modeling_cskv import CSKVCache
from tests.modeling.decoding import SETTINGS, WINDOW, base, close, cskv, decode, held_bytes, new_cache, padding, tokens

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
