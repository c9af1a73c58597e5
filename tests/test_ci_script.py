"""`recipes/ci.sh` as it stands, against the local Hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakehub import READER, FakeHub, metadata_errors
from tests.hub import environment

ROOT = Path(__file__).parents[1]
RECIPE = """
calibrate: {data: [text.txt], samples: 6, seq_len: 48}
init: {ratio_k: 0.5, ratio_v: 0.5, window: 8, sinks: 2}
quantize: {bits_k: 8, bits_v: 8, group: 8}
"""
EVAL = "--task perplexity --task retrieval --data text.txt --samples 2 --seq-len 40 --entries 5 --cases 3"


def ci(tiny, hub, repo, **variables):
    """Run it in `tiny`, with `cskv` on the path as an installed package puts it there."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    ours = {"RECIPE": "recipe.yaml", "EVAL": EVAL, "CSKV_RUN": "run", "PATH": path, "PYTHONPATH": str(ROOT)}
    variables = environment(hub, tiny / "home", **ours | variables)
    command = ["bash", str(ROOT / "recipes" / "ci.sh"), "org/base", repo]
    return subprocess.run(command, cwd=tiny, env=variables, capture_output=True, text=True)


@pytest.fixture
def hub(tiny):
    (tiny / "recipe.yaml").write_text(RECIPE)
    with FakeHub() as hub:
        hub.add("org/base", tiny / "base")
        yield hub


def test_green_then_a_bar_too_high(tiny, hub):
    done = ci(tiny, hub, "me/ci")
    assert done.returncode == 0, done.stderr
    card = hub.files("me/ci")["README.md"].decode()
    gates = {gate["condition"]: gate for gate in json.loads((tiny / "run" / "eval.json").read_text())["fail_under"]}
    assert gates.keys() == {"perplexity_ratio<=1.15", "compression>=0.75"}
    assert all(gate["passed"] for gate in gates.values())
    assert "| perplexity, 78 tokens of text.txt |" in card and "| retrieval, 3 cases" in card
    assert metadata_errors(card) == []
    failed = ci(tiny, hub, "me/too-high", GATES="perplexity_ratio<=1.15 compression>=0.99")
    assert failed.returncode == 3 and "me/too-high" not in hub.repos
    assert "compression>=0.99 does not hold" in failed.stderr and "perplexity_ratio" not in failed.stderr


def test_a_token_that_cannot_push_fails_before_the_work(tiny, hub):
    failed = ci(tiny, hub, "me/ci", HF_TOKEN=READER)
    assert failed.returncode == 1 and "may only read" in failed.stderr
    assert not (tiny / "run" / "calibrate").exists() and READER not in failed.stdout + failed.stderr
