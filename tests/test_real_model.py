"""SmolLM2-135M-Instruct, from its GGUF file to the answers of the exported checkpoint."""

import pytest
import torch
from transformers import AutoTokenizer

from cskv_cli.checkpoint.load import load_checkpoint
from cskv_cli.evaluation.simulation import decode_simulation
from tests.checkpoint.test_export_loads import NEWEST, OLDER, answers
from tests.cli import cskv
from tests.evaluation.test_simulation import token_by_token

pytestmark = pytest.mark.real_model

QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea, and one about the mountains."]


@pytest.fixture(scope="module")
def run(gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    flags = "--data", "builtin", "--samples", 8, "--seq-len", 256, "--ratio-k", 0.5, "--ratio-v", 0.5
    cskv("compress", gguf, "--run", folder, *flags)
    return folder


@pytest.fixture(scope="module")
def prompts(run):
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    chat = lambda text: tokenizer.apply_chat_template(  # noqa: E731
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )
    return [chat(text)["input_ids"] for text in QUESTIONS]


def test_simulation_equals_the_loop_on_a_real_model(run, prompts):
    model = load_checkpoint(run / "export", "cpu", torch.float32)
    ids = torch.tensor(prompts[1] * 3)[None]
    with torch.no_grad():
        expected = token_by_token(model, ids)
        with decode_simulation(model):
            simulated = model(ids, use_cache=False).logits
        plain = model(ids, use_cache=False).logits
    torch.testing.assert_close(simulated, expected, atol=5e-3, rtol=1e-3)
    assert (simulated - plain).abs().max() > 0.1


def test_the_same_answers_under_the_oldest_and_the_newest_version(run, prompts):
    model = dict(folder=run / "export", trust=True)
    newest, oldest = (
        answers(leg, run / f"modules-{leg}", prompts, pad=2, model=model)["model"] for leg in (NEWEST, OLDER[0])
    )
    assert newest["cache"] == oldest["cache"] == "CSKVCache"
    for what in ("greedy", "beams", "second"):
        assert newest[what] == oldest[what], what
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    assert "Paris" in tokenizer.decode(newest["greedy"][0])


def test_quantizing_costs_little_and_says_what_it_saves(run):
    scored = "--data", "builtin", "--samples", 1, "--seq-len", 512
    plain = cskv("eval", run / "export", *scored)
    cskv("compress", "--run", run, "--bits", 4)
    packed = cskv("eval", run / "export", *scored)
    assert packed["base"] == plain["base"]
    assert packed["cskv"]["perplexity"] < plain["cskv"]["perplexity"] * 1.02
    size = packed["cache_bytes_per_token"]
    assert size["cskv"] == pytest.approx(30 * (96 * (16 + 4) / 32 + 48 + 4) + 4)
    assert 1 - size["cskv"] / size["base"] > 0.92  # against a cache in float32
