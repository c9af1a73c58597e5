"""However tokens come in, and whatever is done to a cache: at full rank every family answers as its base does."""

import copy

import pytest
import torch

from tests.families import FAMILIES
from tests.modeling.decoding import base, cskv, decode, new_cache, padding, tokens

LENGTH, NEW = 11, 4  # in all below the 16 tokens from which dynamic RoPE gives earlier tokens other rotations
IDS, STARTS = tokens(2, LENGTH), [0, 3]
MORE = tokens(4, NEW, seed=1)
OPERATIONS = {  # the rows that are left, and of how many tokens
    "deepcopy": ([0, 1], LENGTH, lambda cache: None),
    "crop": ([0, 1], LENGTH - 3, lambda cache: cache.crop(-3)),
    "reorder": ([1, 0], LENGTH, lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
    "repeat": ([0, 0, 1, 1], LENGTH, lambda cache: cache.batch_repeat_interleave(2)),
    "select": ([1], LENGTH, lambda cache: cache.batch_select_indices(torch.tensor([1]))),
}


@torch.no_grad()
def whole(family, ids, mask):
    """Logits of the base in one forward, without a cache."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return base(family)(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_base(family):
    model, mask = cskv(family, window=4), padding(STARTS, LENGTH)
    seen, exact = mask.bool(), whole(family, IDS, mask)
    cache, recorded = new_cache(model), new_cache(model)
    if any(layer.is_sliding for layer in cache.layers):
        recorded.activate_past_recording()  # which sliding windows need before a `crop`
    for given, sizes in ((recorded, [1] * LENGTH), (cache, [5, 1, 5])):  # token by token; a turn, a token, a turn
        got = decode(model, IDS, sizes, given, mask)
        torch.testing.assert_close(got[seen], exact[seen], atol=2e-4, rtol=2e-4)
    for name, (rows, length, act) in OPERATIONS.items():
        other, new = copy.deepcopy(recorded if name == "crop" else cache), MORE[: len(rows)]
        act(other)
        assert other.get_seq_length() == length
        both = padding([STARTS[row] for row in rows], length + NEW)
        got = decode(model, new, [1, NEW - 1], other, both)
        expected = whole(family, torch.cat([IDS[rows, :length], new], dim=1), both)[:, length:]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
