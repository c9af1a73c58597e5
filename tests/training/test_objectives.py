"""Both losses and their gradients, against closed forms and against the real cache."""

import pytest
import torch

from cskv_cli.checkpoint.layers import kv_projections
from cskv_cli.data.recall import Window
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.modeling_cskv import CACHE
from cskv_cli.training.objectives import Distillation, Reconstruction
from cskv_cli.training.student import trained
from tests.families import base_model, compressed, truncated

IDS = torch.randint(3, 97, (41,), generator=torch.Generator().manual_seed(5))
EVERYTHING = Window(IDS, 0, torch.ones(40, dtype=torch.bool))


def student(family="Llama:bias", rank=9, **layout):
    layout = {"window": 8, "sinks": 2} | layout
    model = compressed(base_model(family), truncated(rank), rank=rank, **layout).double()
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in trained(model).items():
        if name.endswith("weight"):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.requires_grad_(True)
    return model


def decoded(model, prefill):
    """Log-probabilities through the real cache: the prompt at once, the others token by token."""
    cache, logits = CSKVCache(model.config), []
    steps = [IDS[:prefill]] if prefill else []
    for ids in steps + list(IDS[prefill:].split(1)):
        logits.append(model(ids[None], use_cache=True, **{CACHE: cache}).logits[0])
    return torch.cat(logits)[:-1].log_softmax(-1)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("prefill", [0, 20])
@pytest.mark.parametrize("family", ["Llama:bias", "Qwen3", "Gemma2"])
def test_distillation_is_the_divergence_of_what_the_cache_says(family, prefill, bits):
    model = student(family, bits=bits, group=8)
    scored = torch.zeros(40, dtype=torch.bool)
    scored[[22, 23, 24, 30, 39]] = True
    with torch.no_grad():
        teacher = model(IDS[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        log_probabilities = decoded(model, prefill)
        expected = (teacher.exp() * (teacher - log_probabilities)).sum(-1)[scored].mean().item()
        right = (log_probabilities.argmax(-1) == IDS[1:])[scored].tolist()
    score = Distillation(model).score(Window(IDS, prefill, scored))
    assert score.loss == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert (score.right, score.answers) == (sum([all(right[:3]), right[3], right[4]]), 3)


def test_the_gradient_of_distillation_is_that_of_finite_differences():
    model = student()
    objective, parameters = Distillation(model), trained(model)
    generator = torch.Generator().manual_seed(1)
    assert objective.backward(EVERYTHING, 0.5) == pytest.approx(objective.score(EVERYTHING).loss)
    for name in ("model.layers.1.self_attn.k_down.weight", "model.layers.2.self_attn.v_up.bias"):
        parameter, direction = (
            parameters[name],
            torch.randn(parameters[name].shape, generator=generator, dtype=torch.float64),
        )
        values = []
        for step in (1e-3, -1e-3):
            parameter.data += step * direction
            values.append(objective.score(EVERYTHING).loss)
            parameter.data -= step * direction
        slope = (values[0] - values[1]) / 2e-3
        assert (parameter.grad * direction).sum().item() == pytest.approx(0.5 * slope, rel=1e-2)


def test_only_factors_and_their_biases_train():
    model = student()
    Distillation(model).backward(EVERYTHING, 1.0)
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == trained(model).keys()
    assert {name.split("self_attn.")[1] for name in with_gradient} == {
        *("k_down.weight", "k_up.weight", "k_up.bias", "v_down.weight", "v_up.weight", "v_up.bias")
    }


def inputs_of(model):
    """What each attention layer of the plain model is given, [tokens, hidden]."""
    seen, handles = {}, []
    for i, layer in enumerate(model.model.layers):

        def see(_, args, kwargs, i=i):
            seen[i] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0]

        handles.append(layer.self_attn.register_forward_pre_hook(see, with_kwargs=True))
    with torch.no_grad():
        model(IDS[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", ["Llama", "Llama:bias", "Phi3", "Gemma2"])
def test_reconstruction_is_the_trace_of_its_closed_form(family):
    """tr((W - AB)^T C (W - AB)) of the Gram matrix C; its gradient for A is -2 C (W - AB) B^T."""
    model = student(family)
    model.float()  # the objective computes in float32
    loss = Reconstruction(model).backward(EVERYTHING, 1.0)
    total = 0.0
    for i, hidden in inputs_of(model).items():
        attention, x = model.model.layers[i].self_attn, hidden[2:].double()  # behind the sinks
        if not hasattr(attention, "k_down"):
            continue
        gram = x.T @ x
        for name, (weight, _) in kv_projections(attention).items():
            down, up = getattr(attention, f"{name}_down").weight, getattr(attention, f"{name}_up").weight
            difference = weight.double() - down.T.double() @ up.T.double()
            size = len(x) * weight.shape[1]
            total += torch.trace(difference.T @ gram @ difference).item() / size
            gradient = (-2 * gram @ difference @ up.double()).T / size
            torch.testing.assert_close(down.grad.double(), gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())
    assert loss == pytest.approx(total, rel=1e-4)
    assert Reconstruction(model).score(EVERYTHING).loss == pytest.approx(loss)


def test_reconstruction_counts_what_the_codes_lose():
    plain = Reconstruction(student(rank=12).float()).score(EVERYTHING).loss
    coarse = Reconstruction(student(rank=12, bits=2, group=8).float()).score(EVERYTHING).loss
    assert coarse > 1.1 * plain
