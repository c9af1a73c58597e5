"""The truncated cache and ASVD."""

import pytest
import torch

from cskv_cli.evaluation import methods
from cskv_cli.evaluation.baselines import svd_cache
from cskv_cli.evaluation.baselines.asvd import asvd_model
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.evaluation.simulation import decode_simulation
from cskv_cli.factorize.asvd import factorize
from cskv_cli.statistics import load_layer
from tests.cli import compress
from tests.evaluation.baselines.reference import decode_with
from tests.evaluation.baselines.test_eviction import decoded, last
from tests.families import base_model
from tests.modeling.decoding import padding, tokens

EVERY = lambda layer, head, step, history: range(step + 1)  # noqa: E731


def truncate(states, rank):
    """[heads, tokens, 16], its smallest singular values removed."""
    matrix = states.transpose(0, 1).flatten(1)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s[rank:] = 0
    return (u * s @ v).unflatten(1, (2, 16)).transpose(0, 1)


def test_a_prompt_loses_the_smallest_half_of_the_singular_values_of_its_cache():
    base, ids = base_model("Llama"), tokens(1, 60, seed=4)
    change = lambda layer, what, states, step: torch.cat([truncate(states[:, :40], 16), states[:, 40:]], 1)  # noqa: E731
    expected = decode_with(base, ids[0], 40, EVERY, change)
    logits, _ = last(decoded(methods.by_ratio("svd-cache", base, 0.5), ids, 40))
    torch.testing.assert_close(logits[0], expected, atol=1e-3, rtol=1e-3)
    assert (logits[0] - base(ids).logits[0]).abs().max() > 0.05


def test_decoded_tokens_join_block_by_block(monkeypatch):
    monkeypatch.setattr(svd_cache, "BLOCK", 12)
    base, ids, read = base_model("Llama"), tokens(1, 40, seed=4), {}

    def change(layer, what, states, step):
        held, count = read.get((layer, what), (states[:, :0], 0))
        if step and step % 12 == 0 and step > count:  # the block before this token is full
            held = truncate(torch.cat([held, states[:, count:step]], 1), 8)
            read[layer, what] = held, step
            count = step
        return torch.cat([held, states[:, count:]], 1)

    expected = decode_with(base, ids[0], 1, EVERY, change)
    logits, _ = last(decoded(methods.by_ratio("svd-cache", base, 0.75), ids, 1))
    torch.testing.assert_close(logits[0], expected, atol=1e-3, rtol=1e-3)


def test_padded_rows_are_truncated_as_alone():
    method = methods.by_ratio("svd-cache", base_model("Llama"), 0.5)
    ids, starts = tokens(2, 60, seed=2), [0, 13]
    logits, _ = last(decoded(method, ids, 50, padding(starts, 60)))
    alone, _ = last(decoded(method, ids[1:, 13:], 37))
    torch.testing.assert_close(logits[1, 13:], alone[0], atol=1e-3, rtol=1e-3)


def test_bytes_of_the_factors():
    method = methods.by_ratio("svd-cache", base_model("Llama"), 0.5)
    _, cache = last(decoded(method, tokens(1, 60), 50))
    assert held_bytes(cache) == 4 * 2 * 4 * (50 * 16 + 16 * 32 + 10 * 32)
    assert method.token_bytes == 4 * 2 * 16 * 4


@pytest.mark.parametrize("family", ["Llama", "Llama:bias"])
def test_asvd_is_its_factors_for_every_token_but_the_one_that_reads(tiny, family):
    base_model(family).save_pretrained(tiny / "base")
    compress(tiny, "--ratio-k", 0.5, "--ratio-v", 0.5)
    calibrated = tiny / "run" / "calibrate"
    model = asvd_model(tiny / "base", calibrated, 0.5, torch.float32)
    base, ids = base_model(family), tokens(1, 40, seed=4)
    for i, block in enumerate(base.model.layers):
        stats, attention = load_layer(calibrated, i), block.self_attn
        for name in "kv":
            a, b = factorize(getattr(attention, f"{name}_proj").weight.T.double(), 16, stats_of(stats))
            up = getattr(model.model.layers[i].self_attn, f"{name}_up")
            down = getattr(model.model.layers[i].self_attn, f"{name}_down")
            torch.testing.assert_close(down.weight.T @ up.weight.T, (a @ b).float(), atol=1e-4, rtol=1e-4)
            if family == "Llama:bias":
                assert torch.equal(up.bias, getattr(attention, f"{name}_proj").bias)
    assert model.config.cskv["window"] == 1 and model.config.cskv["sinks"] == 0
    logits, _ = last(decoded(methods.asvd(model, 0.5), ids, 1))
    with torch.no_grad(), decode_simulation(model):
        torch.testing.assert_close(model(ids, use_cache=False).logits, logits, atol=1e-4, rtol=1e-4)


def stats_of(stats):
    from cskv_cli.factorize import Context

    return Context(stats.gram, stats.mean_abs.double(), 0.5, torch.Generator())


def test_asvd_of_an_export_is_that_of_its_base(tiny):
    compress(tiny, "--ratio-k", 0.25, "--ratio-v", 0.25)
    calibrated = tiny / "run" / "calibrate"
    ids = tokens(1, 30)
    models = [asvd_model(tiny / name, calibrated, 0.75, torch.float32) for name in ("base", "run/export")]
    with torch.no_grad():
        logits = []
        for model in models:
            with decode_simulation(model):
                logits.append(model(ids, use_cache=False).logits)
    assert torch.equal(*logits)
