"""bfloat16 and float16: at full rank the error is the base's own error in that precision."""

import copy

import pytest
import torch

from cskv_cli.modeling.cskv_latents import Latents
from tests.families import base_model, compressed
from tests.modeling.decoding import decode, tokens

IDS = tokens(2, 40, seed=7)
STEPS = [16] + [1] * 24


def rotated(weight):
    """Exact factors whose latents are other numbers than the layer's input: A = Q, B = Q^T W."""
    matrix = torch.randn(weight.shape[1], weight.shape[1], generator=torch.Generator().manual_seed(1))
    turn = torch.linalg.qr(matrix).Q
    return turn, turn.T @ weight.T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["Llama", "Llama:bias", "Qwen3", "Gemma2"])  # no experts: a rounding chooses others
def test_the_error_at_full_rank_is_that_of_the_precision(family, dtype):
    base = base_model(family)
    model = compressed(base, factors=rotated, window=4, sinks=2)
    exact = decode(base, IDS, STEPS)
    torch.testing.assert_close(decode(model, IDS, STEPS), exact, atol=1e-3, rtol=1e-3)
    theirs, ours = (decode(copy.deepcopy(m).to(dtype), IDS, STEPS).float() for m in (base, model))
    assert ours.isfinite().all()
    error, allowed = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert 0 < error < 1.5 * allowed
    sure = exact.topk(2).values.diff().abs()[..., 0] > 8 * allowed  # where the precision does not decide
    assert torch.equal(ours.argmax(-1)[sure], theirs.argmax(-1)[sure]) and sure.float().mean() > 0.3


def test_sums_over_codes_do_not_cancel(monkeypatch):
    """A code's minimum and its multiple of the step are larger than their sum, so that rounding would count twice."""
    model = compressed(base_model("Llama"), factors=rotated, window=4, sinks=2, bits=4, group=4).bfloat16()
    errors, plain = [], Latents.weighted_sum

    def watched(latents, weights, *rest):
        got, exact = plain(latents, weights, *rest), weights.double() @ latents.first(weights.shape[-1]).double()
        errors.append(((got - exact).norm() / exact.norm()).item())
        return got

    monkeypatch.setattr(Latents, "weighted_sum", watched)
    decode(model, IDS, STEPS)
    assert len(errors) > 10 and max(errors) < 2**-9
