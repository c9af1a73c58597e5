"""Choosing how to quantize: the factorization stays the same, and the choice is the best of those tried."""

import json

import pytest
import torch

from cskv_cli.checkpoint.layers import compressible_layers, kv_projections
from cskv_cli.checkpoint.rotary import rotation_for
from cskv_cli.evaluation.attention import AttentionOutput
from cskv_cli.modeling.cskv_quantizer import Quantizer
from cskv_cli.stages.quantize import CLIPS, choose, output_error, principal_axes
from tests.cli import compress, cskv
from tests.families import base_model

RANK, CHANNELS, HIDDEN = 6, 10, 12


def problem(seed=0, spread=4.0):
    """Latents of very unequal variance, and factors that are not orthonormal."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    latents = draw(5, 32, RANK) * torch.logspace(0, -spread / 4, RANK, dtype=torch.float64)
    return latents, draw(HIDDEN, RANK), draw(RANK, CHANNELS)


def squared(latents, b):
    """The squared error of keys or values, as `choose` asks for it."""
    return lambda states: (states - latents @ b).square().sum().item()


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_product_stays_and_the_error_is_what_is_said(bits, per_channel):
    latents, a, b = problem()
    choice = choose(latents, a, b, Quantizer(bits, 8, per_channel), 1, squared(latents, b))
    torch.testing.assert_close(choice.a @ choice.b, a @ b)
    torch.testing.assert_close(choice.b @ choice.b.T, torch.eye(RANK, dtype=torch.float64))
    turned = (latents @ b @ choice.b.T).float()
    rounded = Quantizer(bits, 8, per_channel, choice.clip).round_trip(turned)
    error = ((rounded - turned).double() @ choice.b).square().sum().item()
    assert choice.error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("per_channel", [True, False])
def test_groups_of_heads_have_bases_of_their_own(per_channel):
    latents, a, b = problem()
    blocks = b[:3]  # two groups
    whole = torch.block_diag(*blocks.chunk(2, dim=1))
    choice = choose(latents, a, blocks, Quantizer(3, 8, per_channel), 1, squared(latents, whole))
    basis = torch.block_diag(*choice.b.chunk(2, dim=1))
    torch.testing.assert_close(choice.a @ basis, a @ whole)
    torch.testing.assert_close(basis @ basis.T, torch.eye(RANK, dtype=torch.float64))
    turned = (latents @ whole @ basis.T).float()
    rounded = Quantizer(3, 8, per_channel, choice.clip).round_trip(turned)
    assert choice.error == pytest.approx(((rounded - turned).double() @ basis).square().sum().item(), rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("per_channel", [True, False])
def test_no_worse_than_the_given_axes_without_clipping(seed, per_channel):
    latents, a, b = problem(seed)
    quantizer = Quantizer(2, 8, per_channel)
    turned = latents @ b @ principal_axes(latents.flatten(0, 1), b).T
    plain = (quantizer.round_trip(turned) - turned).square().sum().item()
    assert choose(latents, a, b, quantizer, 1, squared(latents, b)).error <= plain * (1 + 1e-5)


def test_principal_axes_are_those_of_the_keys():
    latents, _, b = problem()
    keys = latents.flatten(0, 1) @ b
    axes = principal_axes(latents.flatten(0, 1), b)
    expected = torch.linalg.svd(keys, full_matrices=False).Vh[:RANK]
    torch.testing.assert_close((axes * expected).sum(-1).abs(), torch.ones(RANK, dtype=torch.float64))


def test_the_choice_minimizes_the_error_it_is_given():
    latents, a, b = problem()
    tried = []

    def error(states):
        tried.append(states)
        return -float(len(tried))  # the last one tried is best

    choice = choose(latents, a, b, Quantizer(2, 8, per_channel=True), 1, error)
    assert len(tried) == 3 * len(CLIPS) and choice.clip == CLIPS[-1] and choice.rotated


def test_output_error_counts_shrinking_once_for_every_layer():
    expected, noise = torch.tensor([3.0, 4.0]), torch.tensor([4.0, -3.0])
    assert output_error(expected + noise, expected, layers=30) == pytest.approx(25)
    assert output_error(expected * 0.9, expected, layers=30) == pytest.approx(30 * 0.25)


def test_sinks_take_no_part():
    latents, a, b = problem()
    wild = latents.clone()
    wild[:, :2] *= 1e3

    def pick(given):
        return choose(given, a, b, Quantizer(2, 8, True), 1, error, sinks=2)

    def error(states):
        return (states - latents @ b)[:, 2:].square().sum().item()

    ours, theirs = pick(wild), pick(latents)
    assert (ours.clip, ours.rotated) == (theirs.clip, theirs.rotated)
    torch.testing.assert_close(ours.a, theirs.a)


@pytest.mark.parametrize("family", ["Llama:bias", "Qwen3", "Phi3", "Gemma2", "GptOss", "Cohere2"])
def test_attention_output_is_that_of_the_layer(family):
    base = base_model(family)
    index = compressible_layers(base.config)[-1]
    attention, hidden = base.model.layers[index].self_attn, torch.randn(2, 7, 64)
    with torch.no_grad():
        kv = {name: hidden @ weight for name, (weight, _) in kv_projections(attention).items()}
        rotation, mask = rotation_for(base, index, 7), torch.full((7, 7), -1e30).triu(1)[None, None]
        expected = attention(hidden_states=hidden, position_embeddings=rotation, attention_mask=mask)[0]
        output = AttentionOutput(base, attention, hidden)
        torch.testing.assert_close(output(**kv), expected, atol=1e-5, rtol=1e-5)
        assert (output(kv["k"].flip(1), kv["v"]) - expected).abs().max() > 1e-4
        assert (output(kv["k"], kv["v"].flip(1)) - expected).abs().max() > 1e-4


def test_verb_reports_and_export_carries_it(tiny):
    compress(tiny, "--ratio-k", 0.5, "--ratio-v", 0.5)
    report = cskv("quantize", "--run", tiny / "run", "--bits", 4, "--bits-v", 2, "--group", 16)
    assert (report["bits_k"], report["bits_v"], report["group"]) == ([4] * 4, [2] * 4, 16)
    assert len(report["layers"]) == 4 and 0 < report["added_error"]["k"] < report["added_error"]["v"] < 1
    exported = cskv("export", "--run", tiny / "run", "--factors", "quantize")
    assert (exported["bits_k"], exported["bits_v"], exported["group"]) == ([4] * 4, [2] * 4, 16)
    per_token = 4 * (16 * (16 * 4 / 8 + 4) / 16 + 16 * 2 / 8 + 4) + 4
    assert exported["cache_bytes_per_token"]["cskv"] == per_token
    block = json.loads((tiny / "run" / "export" / "config.json").read_text())["cskv"]
    assert block["clip_k"] == [layer["k"]["clip"] for layer in report["layers"]]
    found = cskv("inspect", tiny / "run" / "export")
    assert found["cache_bytes_per_token"] == exported["cache_bytes_per_token"]
    assert found["paper_example"]["base_bytes"] == 32 * 200_000 * 2 * 4096 * 2
    states = {s["stage"]: s["state"] for s in cskv("status", "--run", tiny / "run")["stages"]}
    assert states["quantize"] == states["export"] == "ready"


def test_init_again_makes_quantize_stale_and_export_says_so(tiny):
    compress(tiny, "--bits", 4, "--group", 16)
    cskv("init", "--run", tiny / "run", "--ratio-k", 0.75)
    failure = cskv("export", "--run", tiny / "run", exit_code=1)
    assert "init has changed since" in failure["error"] and "cskv quantize" in failure["hint"]


def test_tokens_that_fit_use_the_memory_up(tiny):
    from cskv_cli.layout import Layout
    from cskv_cli.memory import Shape, cache_bytes

    compress(tiny, "--bits", 4, "--group", 16)
    found = cskv("inspect", tiny / "run" / "export")
    layout = Layout(**json.loads((tiny / "run" / "export" / "config.json").read_text())["cskv"])
    room = 10**9 - found["weight_bytes"]
    fits = found["tokens_that_fit"]["1 GB"]["cskv"]
    assert cache_bytes(Shape(32, 4), layout, fits) <= room < cache_bytes(Shape(32, 4), layout, fits + 16)
