"""One item or all of them compressed: what is measured is what the real cache gives."""

import pytest
import torch

from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.modeling_cskv import CACHE
from cskv_cli.search.options import Option

MIXED = {
    (0, "k"): Option(9, 2),
    (0, "v"): Option(20),  # 16 bits beside codes
    (1, "k"): Option(32),  # exact keys beside cut values
    (1, "v"): Option(7, 4),
    (2, "k"): Option(32),  # a whole layer
    (2, "v"): Option(32),
    (3, "k"): Option(32, 3),
    (3, "v"): Option(12, 8),
}


def through_the_cache(simulator, base, window):
    """KL at the scored tokens of a loop through the real cache, after the prefill one token at a time."""
    cache, prefill = CSKVCache(simulator.model.config), max(window.prefill, 1)
    parts = window.ids[None].split([prefill] + [1] * (len(window.ids) - prefill), dim=1)
    with torch.no_grad():
        steps = [simulator.model(part, use_cache=True, **{CACHE: cache}).logits for part in parts]
        expected = base(window.ids[None], use_cache=False).logits
    p, q = (logits[0, :-1][window.scored].log_softmax(-1) for logits in (expected, torch.cat(steps, dim=1)))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize("family", ["Llama:bias", "Qwen3", "Phi3", "Falcon:new"])
def test_a_setting_of_mixed_bits_and_whole_layers_equals_decoding_through_the_cache(make_simulator, windows, family):
    simulator, base = make_simulator(family)
    for window in windows:
        got = simulator.divergence(MIXED, window, simulator.exact(window, hidden=False, attention=False))
        assert got == pytest.approx(through_the_cache(simulator, base, window), rel=1e-4)
        assert got > 1e-3
    assert [type(layer).__name__ for layer in CSKVCache(simulator.model.config).layers][2] == "DynamicLayer"


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3", "Cohere2", "Falcon:new"])
def test_from_a_layer_up_equals_the_whole_forward(make_simulator, windows, family):
    layers = (1, 3) if family in ("Gemma2", "Cohere2") else (0, 1, 2, 3)
    simulator, _ = make_simulator(family, layers=layers)
    for window in windows:
        part, whole = (simulator.exact(window, hidden=hidden, attention=False) for hidden in (True, False))
        for layer in layers:
            for name, option in (("k", Option(9, 2)), ("v", Option(5))):
                setting = {(layer, name): option}
                expected = simulator.divergence(setting, window, whole)
                assert simulator.divergence(setting, window, part) == pytest.approx(expected, rel=1e-9)
                assert expected > 1e-6


def test_layers_below_do_no_work_and_get_their_forward_back(make_simulator, windows):
    simulator, _ = make_simulator("Llama")
    ran, layers = [], simulator.model.model.layers
    exact = simulator.exact(windows[0], hidden=True, attention=False)
    for i, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda *_, i=i: ran.append(i))
    simulator.divergence({(2, "k"): Option(4)}, windows[0], exact)
    assert ran == [2, 3]
    simulator.divergence({(0, "k"): Option(4)}, windows[0], exact)
    assert ran == [2, 3, 0, 1, 2, 3]


def test_only_the_item_is_compressed(make_simulator, windows):
    simulator, _ = make_simulator("Llama")
    exact = simulator.exact(windows[0], hidden=True, attention=True)
    keys, values = ({(1, name): Option(6)} for name in "kv")
    apart = [simulator.divergence(setting, windows[0], exact) for setting in (keys, values)]
    assert len(set(apart)) == 2 and min(apart) > 1e-6
    assert simulator.divergence({(1, "k"): Option(32)}, windows[0], exact) == pytest.approx(0, abs=1e-12)
    simulator.divergence(MIXED, windows[0], exact)
    assert simulator.divergence(keys, windows[0], exact) == pytest.approx(apart[0], rel=1e-9)  # nothing is left over


def test_output_error_is_that_of_the_attention_output(make_simulator, windows):
    simulator, base = make_simulator("Llama")
    window = windows[1]
    exact = simulator.exact(window, hidden=True, attention=True)
    outputs = []
    hook = base.model.layers[2].self_attn.register_forward_hook(lambda m, a, o: outputs.append(o[0]))
    with torch.no_grad():
        base(window.ids[None], use_cache=False)
    hook.remove()
    simulator.model.model.layers[2].self_attn.register_forward_hook(lambda m, a, o: outputs.append(o[0]))
    simulator.divergence({(2, "v"): Option(6, 3)}, window, exact)
    difference = (outputs[1] - outputs[0])[0]
    assert difference[: window.prefill].abs().max() < 1e-9  # read exactly
    expected = difference[window.prefill :].square().sum(-1).mean().item()
    assert simulator.output_error((2, "v"), Option(6, 3), window, exact) == pytest.approx(expected, rel=1e-6)
