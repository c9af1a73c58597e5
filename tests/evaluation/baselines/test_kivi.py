"""KIVI against fake quantization in a decoder without a cache, and its bytes."""

import pytest
import torch

from cskv_cli.evaluation import methods
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.modeling.cskv_quantizer import dequantize, quantize
from tests.evaluation.baselines.reference import decode_with
from tests.evaluation.baselines.test_eviction import decoded, last
from tests.families import base_model
from tests.modeling.decoding import padding, tokens

LENGTH = 110


def fake(groups, bits):
    """Groups (the last axis) with all of their numbers rounded to the levels that codes can say."""
    return dequantize(*quantize(groups, bits), groups.dtype)


def kivi(bits):
    def change(layer, what, states, step):
        """`step` tokens were there before this one; [heads, step + 1, 16]."""
        states = states.clone()
        count = step // 32 * 32 if what == "k" else max(step - 32, 0)
        old = states[:, :count]
        if what == "k":
            states[:, :count] = fake(old.unflatten(1, (-1, 32)).transpose(2, 3), bits).transpose(2, 3).flatten(1, 2)
        else:
            states[:, :count] = fake(old, bits)  # 16 channels are one group
        return states

    return change


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("prompt", [1, 70])
def test_logits_are_those_of_fake_quantization(bits, prompt):
    base, ids = base_model("Llama"), tokens(1, LENGTH, seed=3)
    expected = decode_with(base, ids[0], prompt, lambda layer, head, step, history: range(step + 1), kivi(bits))
    logits, _ = last(decoded(methods.kivi(base, bits), ids, prompt))
    torch.testing.assert_close(logits[0], expected, atol=0.02, rtol=0.02)  # a float's noise moves a rounding
    assert (logits[0] - base(ids).logits[0]).abs().max() > 0.1


@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_of_codes_minima_steps_and_the_exact_rest(bits):
    method = methods.kivi(base_model("Llama", head_dim=32), bits)
    _, cache = last(decoded(method, tokens(1, 170), 150))
    group = 32 * bits // 8 + 4
    keys = 64 * (5 * group + 32 * 4)  # the ten keys of an unfinished group have the room of a whole one
    values = 2 * (170 - 32) * group + 64 * 32 * 4
    assert held_bytes(cache) == 4 * (keys + values)
    assert method.token_bytes == 4 * 2 * 64 * (bits + 1) / 8


def test_padding_does_not_widen_a_group():
    """Full groups of padding aside, a padded row is quantized in the groups of the row alone."""
    method = methods.kivi(base_model("Llama"), 2)
    ids = tokens(2, LENGTH, seed=2)
    ids[1, :32] = 0
    logits, _ = last(decoded(method, ids, 80, padding([0, 32], LENGTH)))
    alone, _ = last(decoded(method, ids[1:, 32:], 48))
    torch.testing.assert_close(logits[1, 32:], alone[0], atol=1e-4, rtol=1e-4)
    ids[1, 20:32] = 50
    other, _ = last(decoded(method, ids, 80, padding([0, 32], LENGTH)))
    torch.testing.assert_close(logits[1, 32:], other[1, 32:], atol=1e-4, rtol=1e-4)
