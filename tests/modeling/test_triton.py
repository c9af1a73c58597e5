"""The Triton kernels, run by Triton's interpreter, say what the torch path says."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.dynamic_module_utils import get_imports

pytest.importorskip("triton")

from cskv_cli.modeling import cskv_decode, cskv_triton
from cskv_cli.modeling.cskv_factors import up_projection
from cskv_cli.modeling.cskv_latents import Latents
from cskv_cli.modeling.cskv_quantizer import Quantizer
from cskv_cli.modeling.cskv_triton import checked, key_scores, weighted_sum
from tests.families import base_model, compressed, truncated
from tests.modeling.decoding import RANK, close, padding, tokens
from tests.modeling.test_decode import LENGTH, both
from tests.modeling.test_head_groups import SETTINGS, grouped

BITS = [None, 2, 3, 4, 8]


def store(batch, length, rank, bits=None, group=8, dtype=torch.float32, per_channel=True):
    """Latents of so many tokens, and, where codes need whole groups, a few more."""
    generator = torch.Generator().manual_seed(rank)
    quantizer = None if bits is None else Quantizer(bits, group, per_channel)
    latents = Latents(quantizer, tokens_last=per_channel)
    latents.append(torch.randn(batch, -(-length // group) * group, rank, generator=generator).to(dtype))
    latents.append(torch.randn(batch, 1, rank, generator=generator).to(dtype))
    if bits is not None:
        latents.settle(torch.zeros(batch, dtype=torch.long))
    return latents


@torch.no_grad()
def scores(latents, up, query, factors, length):
    """q . [k^ * cos, k^ * sin] of the first tokens, from keys in one piece."""
    keys = up(latents.first(length).float()).unflatten(-1, (query.shape[1], -1)).permute(0, 2, 3, 1)
    turned = keys if factors is None else (keys.unsqueeze(2) * factors[..., :length].float()).flatten(2, 3)
    return query.float() @ turned


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "heads, queries, dim, rank, groups, batch, length, group",
    [
        (2, 2, 16, 12, 1, 2, 26, 4),  # grouped queries, less than one tile
        (4, 1, 16, 37, 1, 1, 300, 6),  # as many key heads as heads, several tiles and several blocks of the rank
        (1, 5, 24, 40, 1, 2, 67, 32),  # one key head; a head that is no power of two
        (6, 2, 8, 42, 3, 2, 70, 5),  # groups of heads
    ],
)
def test_scores(heads, queries, dim, rank, groups, batch, length, group, bits):
    torch.manual_seed(0)
    latents, bias = store(batch, length, rank, bits, group), heads != 4
    up = up_projection(rank, heads * dim, groups, bias)
    if bias:
        nn.init.normal_(up.bias)
    for rows in (0, 1, batch):  # without rotation, and with one for all rows or for each
        query = torch.randn(batch, heads, queries, dim * (2 if rows else 1))
        factors = torch.randn(rows, 1, 2, dim, length + 9) if rows else None
        got = key_scores(latents, up, query, factors, length)
        torch.testing.assert_close(got, scores(latents, up, query, factors, length), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize(
    "heads, rank, groups, batch, length, group",
    [(4, 12, 1, 2, 26, 4), (1, 37, 1, 1, 300, 6), (40, 90, 1, 2, 67, 32), (6, 42, 3, 2, 130, 5), (150, 70, 2, 1, 9, 3)],
)
def test_weighted_sum(heads, rank, groups, batch, length, group, bits, monkeypatch):
    latents = store(batch, length, rank, bits, group, per_channel=False)
    weights = torch.rand(batch, heads, length + 7, generator=torch.Generator().manual_seed(1))[..., 3 : length + 3]
    expected = latents.first(length).unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=2)
    expected = torch.einsum("bht,bthr->bhr", weights, expected)
    for splits in (1, 512):
        monkeypatch.setattr(cskv_triton, "SPLITS", splits)
        torch.testing.assert_close(weighted_sum(latents, weights, groups), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(latents.weighted_sum(weights, groups, group), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [None, 3, 4])
def test_half_precision(bits):
    """The codes are rounded to the model's precision, as in torch; sums are in float32."""
    latents = store(2, 130, 40, bits, 32, torch.float16)
    up = nn.Linear(40, 32).half()
    query, factors = torch.randn(2, 2, 3, 32).half(), torch.rand(1, 1, 2, 16, 200).half()
    got = key_scores(latents, up, query, factors, 130)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, scores(latents, up.float(), query, factors, 130), rtol=0, atol=0.02)


@pytest.fixture
def kernels(monkeypatch):
    """Takes the kernels on a CPU too, and notes which were called."""
    calls = []
    monkeypatch.setattr(cskv_decode, "usable", lambda tensor: True)
    monkeypatch.setattr(cskv_triton, "_trusted", {})
    for kernel in (key_scores, weighted_sum):
        noted = lambda *args, kernel=kernel: calls.append(kernel.__name__) or kernel(*args)  # noqa: E731
        monkeypatch.setattr(cskv_decode, kernel.__name__, noted)
    return calls


@pytest.mark.parametrize("bits", [None, 3])
@pytest.mark.parametrize("family", ["Llama:bias", "Gemma2", "GptOss", "Phi3:partial", "SmolLM3", "Qwen3"])
def test_a_decode_step(family, bits, kernels):
    """Softcap, attention sinks, partial rotation and none, padding: all of it stands around the kernels."""
    model = compressed(base_model(family), truncated(RANK), rank=RANK, window=8, sinks=2, bits=bits, group=4)
    close(*both(model, tokens(2, LENGTH), padding([0, 3], LENGTH), prompt=LENGTH - 2))
    assert all(cskv_triton._trusted.values())
    layers = sum(rank is not None for rank in model.config.cskv["rank_k"])
    expected = {"key_scores": 0 if family == "Qwen3" else 2 * layers, "weighted_sum": 0 if bits is None else 2 * layers}
    assert {name: kernels.count(name) for name in expected} == expected  # Qwen3 normalizes keys before rotating them


def test_a_decode_step_of_head_groups(kernels):
    model = compressed(base_model("Llama:bias"), grouped, head_groups=2, bits=3, **SETTINGS)
    close(*both(model, tokens(2, LENGTH), prompt=LENGTH - 2))
    assert all(cskv_triton._trusted.values()) and {*kernels} == {"key_scores", "weighted_sum"}


@pytest.mark.parametrize("fault", ["fails", "errs", "is no number"])
def test_a_kernel_that_is_wrong_is_not_used(fault, kernels, monkeypatch):
    model = compressed(base_model("Llama"), truncated(RANK), rank=RANK, window=8, sinks=2)
    wrong = {
        "fails": lambda *args: 1 / 0,
        "errs": lambda *args: key_scores(*args) * 1.1,
        "is no number": lambda *args: key_scores(*args) * torch.nan,
    }
    monkeypatch.setattr(cskv_decode, "key_scores", lambda *args: kernels.append(1) or wrong[fault](*args))
    with pytest.warns(UserWarning, match="without its Triton kernel"):
        got, expected = both(model, tokens(2, LENGTH), prompt=LENGTH - 2)
    assert torch.equal(got, both(model, tokens(2, LENGTH), prompt=LENGTH - 2)[0]) and len(kernels) == 1
    close(got, expected)


def test_each_kind_of_kernel_is_tried_once(monkeypatch):
    monkeypatch.setattr(cskv_triton, "_trusted", {})
    tried, right, wrong = [], torch.ones(3), torch.zeros(3)
    plainly = lambda: tried.append(1) or right  # noqa: E731
    assert checked(("a",), lambda: right + 0.01, plainly) is right
    assert checked(("a",), lambda: wrong, plainly) is wrong and len(tried) == 1
    with pytest.warns(UserWarning, match="off by 100.0%"):
        assert checked(("b",), lambda: wrong, plainly) is right
    assert checked(("b",), lambda: wrong, plainly) is right and len(tried) == 3


def test_they_compile_for_gpus(tmp_path):
    """To machine code, by Triton's own compiler; nothing is run."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-m", "tests.modeling.compile_kernels"], env=env, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    made = json.loads(run.stdout)
    assert len(made) == 6 and max(made.values()) <= 64 * 1024  # bytes of shared memory: what any GPU has


def test_the_file_imports_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("without_triton", cskv_triton.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.triton is None and not module.usable(torch.ones(1).half())
    assert "triton" not in get_imports(cskv_triton.__file__)  # which transformers would ask for
