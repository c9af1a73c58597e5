"""An exported checkpoint on a stranger's machine: no cskv there, offline, another folder name, another transformers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import compress

LEGACY = Path(__file__).parents[2] / ".venvs/transformers-4.57.6"
SCRIPT = Path(__file__).with_name("load_export.py")
PROMPTS = [list(range(10, 31)), list(range(40, 52))]


def run_alone(script, *arguments, modules, legacy=False):
    """What a script prints, in an interpreter outside this repository."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(modules)}
    environment["PYTHONPATH"] = str(LEGACY) if legacy else ""
    command = [sys.executable, *map(str, (script, *arguments))]
    result = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def answers(folder, trust=True, prompts=PROMPTS, pad=0, legacy=False, save_to=None, modules=None):
    """What `load_export.py` prints."""
    arguments = folder, int(trust), json.dumps(prompts), pad, *([save_to] if save_to else [])
    return run_alone(SCRIPT, *arguments, modules=modules or folder.parent / "modules", legacy=legacy)


@pytest.mark.parametrize("legacy", [False, True], ids=["newest", "4.57.6"])
def test_full_rank_answers_as_the_base(tiny, legacy):
    compress(tiny, "--rank-k", 32, "--rank-v", 32, "--window", 4, "--sinks", 2)
    shutil.move(tiny / "run" / "export", tiny / "模型 1.5-dir")
    base = answers(tiny / "base", trust=False, legacy=legacy)
    ours = answers(tiny / "模型 1.5-dir", legacy=legacy, save_to=tiny / "saved-2.0")
    assert (ours["class"], ours["cache"]) == ("CSKVLlamaForCausalLM", "CSKVCache")
    assert ours["transformers"].startswith("4.57.6" if legacy else "5.")
    for what in ("greedy", "beams", "second"):
        assert ours[what] == base[what], what
    assert ours["again"] == ours["greedy"]
    assert sum(map(sum, ours["logits"])) == pytest.approx(sum(map(sum, base["logits"])), abs=1e-2)


@pytest.mark.parametrize("bits", [(), ("--bits", 4, "--group", 4)], ids=["float", "4 bit"])
def test_low_rank_answers_alike_in_both_versions(tiny, bits):
    compress(tiny, "--rank-k", 9, "--rank-v", 12, "--window", 4, "--sinks", 2, *bits)
    newest, oldest = (answers(tiny / "run" / "export", legacy=legacy) for legacy in (False, True))
    assert newest["cache"] == oldest["cache"] == "CSKVCache"
    for what in ("greedy", "beams", "second"):
        assert newest[what] == oldest[what], what
    for ours, theirs in zip(newest["logits"], oldest["logits"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-2)


@pytest.mark.parametrize("legacy", [False, True], ids=["newest", "4.57.6"])
def test_without_remote_code_it_is_the_base(tiny, legacy):
    compress(tiny, "--rank-k", 2, "--rank-v", 2)
    base = answers(tiny / "base", trust=False, legacy=legacy)
    plain = answers(tiny / "run" / "export", trust=False, legacy=legacy)
    assert (plain["class"], plain["cache"]) == ("LlamaForCausalLM", "DynamicCache")
    assert plain["logits"] == base["logits"] and plain["second"] == base["second"]
