"""KIVI beside the settings of a search."""

from dataclasses import replace

import pytest
import torch

from cskv_cli.data.recall import Window
from cskv_cli.evaluation import methods
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.evaluation.perplexity import compare
from cskv_cli.modeling.modeling_cskv import CACHE
from cskv_cli.search.baselines import kivi_bytes, kivi_divergences
from tests.families import base_model
from tests.search.test_costs import FRAME


@pytest.fixture
def windows():
    """Two of plain text, one with a prefill, long enough that codes are read."""
    ids = torch.randint(3, 97, (3, 120), generator=torch.Generator().manual_seed(6))
    every, late = torch.ones(119, dtype=torch.bool), torch.arange(119) % 7 == 6
    return [Window(ids[0], 0, every), Window(ids[1], 70, late & (torch.arange(119) >= 70)), Window(ids[2], 0, late)]


def test_kivi_is_scored_as_eval_scores_it(make_simulator, windows):
    simulator, base = make_simulator("Llama")
    exacts = [simulator.exact(window, hidden=False, attention=False) for window in windows]
    got = kivi_divergences(simulator.model, 2, windows, exacts)
    kivi = methods.kivi(base, 2)
    assert got[0] == pytest.approx(compare([kivi], windows[0].ids[None])[0].summary("kivi")["kl"], rel=1e-4)
    for i in (1, 2):
        assert got[i] == pytest.approx(decoded(kivi, windows[i]), rel=1e-4) and got[i] > 1e-4


def decoded(method, window):
    """Mean KL over the scored tokens, a token at a time after the prefill."""
    exact = method.model(window.ids[None], use_cache=False).logits[0].log_softmax(-1)
    cache, kls, start = method.new_cache(), [], window.prefill
    with torch.inference_mode(), method.ready():
        if start:
            method.model(window.ids[None, :start], use_cache=True, **{CACHE: cache})
        for i in range(start, len(window.ids) - 1):
            logits = method.model(window.ids[None, i : i + 1], use_cache=True, **{CACHE: cache}).logits[0, 0]
            if window.scored[i]:
                kls.append((exact[i].exp() * (exact[i] - logits.log_softmax(-1))).sum().item())
    return sum(kls) / len(kls)


@pytest.mark.parametrize("tokens", [20, 32, 75])
def test_kivi_bytes_are_those_of_a_real_cache(tokens):
    base = base_model("Llama").bfloat16()
    method = methods.kivi(base, 4)
    cache = method.new_cache()
    with torch.inference_mode(), method.ready():
        base(torch.randint(3, 97, (1, tokens)), use_cache=True, **{CACHE: cache})
    frame = replace(FRAME, tokens=tokens, shape=replace(FRAME.shape, heads=2))
    per_layer = kivi_bytes(frame, 4) / len(frame.layers)
    assert frame.shape.channels == 32
    assert held_bytes(cache) / 4 == pytest.approx(per_layer)
