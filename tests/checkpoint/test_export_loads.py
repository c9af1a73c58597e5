"""Exported checkpoints on a stranger's machine: no cskv there, offline, other folder names, other transformers."""

import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from cskv_cli.modeling.modeling_cskv import TESTED
from tests.cli import compress
from tests.families import write_tiny

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("load_export.py")
OLDER = re.search(r"^LEGS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
NEWEST = transformers.__version__
LEGS = [*OLDER, NEWEST]
PROMPTS = [list(range(10, 31)), list(range(40, 52))]
FULL = "--rank-k", 32, "--rank-v", 32, "--window", 4, "--sinks", 2
LOW = "--rank-k", 9, "--rank-v", 12, "--window", 4, "--sinks", 2


def run_alone(script, *arguments, leg, modules, cwd="/"):
    """What a script prints under transformers `leg`, in an interpreter outside this repository."""
    overlay = ROOT / f".venvs/transformers-{leg}"
    assert leg == NEWEST or overlay.exists(), f"{overlay} is missing: run `make test`"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(modules)}
    environment["PYTHONPATH"] = "" if leg == NEWEST else str(overlay)
    command = [sys.executable, *map(str, (script, *arguments))]
    result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def answers(leg, modules, prompts=PROMPTS, pad=0, cwd="/", **models):
    """What `load_export.py` prints of `models`."""
    task = json.dumps({"prompts": prompts, "pad": pad, "models": models}, default=str)
    found = run_alone(SCRIPT, task, leg=leg, modules=modules, cwd=cwd)
    assert found["transformers"] == leg
    return found["models"]


@pytest.fixture(scope="module")
def exports(tmp_path_factory, tokenizer, text):
    """Checkpoints of one tiny model, in folders of all kinds of names."""
    folder = tmp_path_factory.mktemp("exports")
    write_tiny(folder, tokenizer, text)
    for name, flags in {
        "模型 1.5-dir": FULL,
        "m-1.5-32k": LOW,
        "low 4 bit": (*LOW, "--bits", 4, "--group", 4),
    }.items():
        compress(folder, *flags)
        shutil.copytree(folder / "run" / "export", folder / name)
    return folder


@pytest.fixture(scope="module")
def found(exports):
    """By leg, what all of them answer; each leg is asked once."""

    @functools.cache
    def of(leg):
        return answers(
            leg,
            exports / f"modules-{leg}",
            cwd=exports / "low 4 bit",
            base=dict(folder=exports / "base", trust=False),
            full=dict(folder=exports / "模型 1.5-dir", trust=True, save=exports / f"saved-{leg}"),
            here=dict(folder=".", trust=True),
            slash=dict(folder=f"{exports / 'm-1.5-32k'}/", trust=True),
            plain=dict(folder=exports / "m-1.5-32k", trust=False),
            low=dict(folder=exports / "m-1.5-32k", trust=True),
            quantized=dict(folder=exports / "low 4 bit", trust=True),
        )

    return of


def same_logits(ours, theirs, atol):
    torch.testing.assert_close(torch.tensor(ours["logits"]), torch.tensor(theirs["logits"]), atol=atol, rtol=atol)


@pytest.mark.parametrize("leg", LEGS)
def test_full_rank_answers_as_the_base(found, leg):
    base, full = found(leg)["base"], found(leg)["full"]
    assert (full["class"], full["cache"]) == ("CSKVLlamaForCausalLM", "CSKVCache")
    for what in ("greedy", "beams", "second"):
        assert full[what] == base[what], what
    assert full["again"] == full["greedy"]
    same_logits(full, base, 2e-4)


@pytest.mark.parametrize("leg", OLDER)
@pytest.mark.parametrize("which", ["low", "quantized"])
def test_low_rank_answers_alike_in_all_versions(found, which, leg):
    ours, newest = found(leg)[which], found(NEWEST)[which]
    assert ours["cache"] == newest["cache"] == "CSKVCache"
    for what in ("greedy", "beams", "second"):
        assert ours[what] == newest[what], what
    same_logits(ours, newest, 1e-3)
    assert ours["logits"] != found(leg)["full"]["logits"]


@pytest.mark.parametrize("leg", LEGS)
def test_the_folder_that_one_is_in_and_a_slash_at_the_end(found, leg):
    assert found(leg)["here"] == found(leg)["quantized"]
    assert found(leg)["slash"] == found(leg)["low"]


@pytest.mark.parametrize("leg", LEGS)
def test_without_remote_code_it_is_the_base(found, leg):
    plain, base = found(leg)["plain"], found(leg)["base"]
    assert (plain["class"], plain["cache"]) == ("LlamaForCausalLM", "DynamicCache")
    assert plain["logits"] == base["logits"] and plain["second"] == base["second"]


def test_the_range_that_the_model_states_begins_with_the_oldest_leg():
    assert TESTED[0] == OLDER[0]


@pytest.mark.parametrize(
    "version, warns",
    [("4.57.5", True), ("4.57.6", False), ("5.0.0", False), ("5.24.9", False), ("5.25.0.dev0", True), ("6.0", True)],
)
def test_outside_the_tested_range_it_warns_once_and_goes_on(exports, modules, monkeypatch, version, warns):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers.cskv")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(transformers, "__version__", version)
    for name in ("m-1.5-32k", "模型 1.5-dir"):  # each brings the file
        model = AutoModelForCausalLM.from_pretrained(exports / name, trust_remote_code=True)
        assert type(model).__name__ == "CSKVLlamaForCausalLM"
    assert len(said) == warns and all(f"not under {version}" in line for line in said)
