"""Odd places to write to, and bases that lack something or bring too much."""

import io
import json
import re
import sys

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer

from cskv_cli.checkpoint.load import load_base, load_checkpoint
from tests.cli import CALIBRATION, compress, cskv
from tests.commands.test_compress import digests
from tests.families import base_model

FULL = "--rank-k", 32, "--rank-v", 32, "--window", 4, "--sinks", 2


@pytest.fixture(autouse=True)
def no_prompt(monkeypatch):
    """Whoever asks a question fails."""

    def ask(*arguments):
        pytest.fail(f"asked {arguments}")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def edit(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("out", [".", "dir/", "a b/模型", "m-1.5-32k"])
def test_places_for_the_checkpoint(tiny, monkeypatch, out):
    here = tiny / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    report = compress(tiny, *FULL, "--out", out)
    export = {name: digest for name, digest in digests(tiny / "run" / "export").items() if name != "manifest.json"}
    assert digests(here / out) == export
    assert sorted(tiny.iterdir()) == sorted(tiny / name for name in ("base", "here", "run", "text.txt"))
    assert (here / out / "config.json").exists() and list((here / out).resolve().iterdir())
    assert compress(tiny, *FULL, "--out", out) == report
    compress(tiny, "--rank-k", 2, "--rank-v", 2, "--out", out)  # what is there is an older export, and it is said
    assert json.loads((here / out / "config.json").read_text())["cskv"]["rank_k"] == [2] * 4


def test_a_base_without_a_tokenizer_is_refused_before_the_work(tiny):
    for path in (tiny / "base").glob("tokenizer*"):
        path.unlink()
    failure = compress(tiny, exit_code=1)
    assert f"{tiny / 'base'} has no usable tokenizer" in failure["error"]
    assert not (tiny / "run" / "calibrate").exists()


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(tiny):
    edit(
        tiny / "base" / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["own.Tokenizer", None]},
        tokenizer_class="X",
    )
    (tiny / "base" / "own.py").write_text("raise SystemExit('this was run')")
    failure = compress(tiny, exit_code=1)
    assert "no usable tokenizer" in failure["error"] and "custom code" in failure["error"]


def test_a_sentencepiece_model_alone_is_a_tokenizer(tiny, text):
    for path in (tiny / "base").glob("tokenizer*"):
        path.unlink()
    lines = [text[i : i + 200] for i in range(0, 4000, 200)]
    with (tiny / "base" / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=40, model_type="bpe", minloglevel=2
        )
    compress(tiny, *FULL)
    export = tiny / "run" / "export"
    assert (export / "tokenizer.model").read_bytes() == (tiny / "base" / "tokenizer.model").read_bytes()
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (export, tiny / "base"))
    assert ours(text[:300])["input_ids"] == theirs(text[:300])["input_ids"]


def test_an_invalid_generation_config_is_taken_along_as_it_is(tiny):
    path = tiny / "base" / "generation_config.json"
    edit(path, do_sample=False, temperature=0.6, top_p=0.9)
    compress(tiny, *FULL)
    assert (tiny / "run" / "export" / path.name).read_bytes() == path.read_bytes()
    ids = torch.arange(10, 30)[None]
    models = load_checkpoint(tiny / "run" / "export", "cpu", "auto"), load_base(tiny / "base", "cpu", "auto")
    ours, theirs = (model.generate(ids, max_new_tokens=8, pad_token_id=0) for model in models)
    assert torch.equal(ours, theirs)


def test_tied_embeddings_stay_tied(tiny):
    base_model("Llama", tie_word_embeddings=True).save_pretrained(tiny / "base")
    compress(tiny, *FULL)
    model, base = load_checkpoint(tiny / "run" / "export", "cpu", "auto"), load_base(tiny / "base", "cpu", "auto")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(10, 30)[None]
    torch.testing.assert_close(model(ids).logits, base(ids).logits)


OWN = """from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    pass


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        CHANGE
        return output
"""


def bring_code(base, code):
    edit(base / "config.json", auto_map={"AutoModelForCausalLM": "own.OwnModel", "AutoConfig": "own.OwnConfig"})
    (base / "own.py").write_text(code)


def test_code_of_its_own_is_not_run_unless_it_is_trusted(tiny):
    bring_code(tiny / "base", "raise SystemExit('this was run')")
    for verb in ("compress", "calibrate"):
        failure = cskv(verb, tiny / "base", "--run", tiny / "run", *CALIBRATION, exit_code=1)
        assert "brings its own code" in failure["error"] and "--trust-remote-code" in failure["hint"]


def test_trusted_code_that_is_the_same_model_is_taken_and_remembered(tiny, modules):
    bring_code(tiny / "base", OWN.replace("CHANGE", ""))
    compress(tiny, *FULL, "--trust-remote-code")
    cskv("export", "--run", tiny / "run", "--copy")
    config = json.loads((tiny / "run" / "export" / "config.json").read_text())
    assert set(config["auto_map"].values()) == {"modeling_cskv.CSKVLlamaForCausalLM"}
    ids = torch.arange(10, 30)[None]
    model = load_checkpoint(tiny / "run" / "export", "cpu", "auto")
    torch.testing.assert_close(model(ids).logits, load_base(tiny / "base", "cpu", "auto")(ids).logits)


@pytest.mark.parametrize(
    "code, reason",
    [
        (OWN.replace("CHANGE", "output.logits = output.logits * 2"), "is another model than transformers' Llama"),
        (
            OWN.replace("CHANGE", "raise KeyError('rope')"),
            "does not stand in for transformers' LlamaForCausalLM .*rope",
        ),
        ("x = 1", "does not stand in for transformers' LlamaForCausalLM"),
    ],
)
def test_trusted_code_that_is_another_model_is_refused(tiny, modules, code, reason):
    bring_code(tiny / "base", code)
    assert re.search(reason, compress(tiny, "--trust-remote-code", exit_code=1)["error"])
    edit(tiny / "base" / "config.json", model_type="own")
    failure = compress(tiny, "--trust-remote-code", exit_code=1)
    assert "transformers has no causal language model of type own" in failure["error"]
