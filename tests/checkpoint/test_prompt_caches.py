"""A document is read in one process, and asked about in others, with nothing there but transformers."""

import json
from pathlib import Path

import pytest

from tests.checkpoint.test_export_loads import NEWEST, OLDER, run_alone
from tests.cli import compress

SCRIPT = Path(__file__).with_name("load_cache.py")
DOCUMENTS = [list(range(10, 61)), list(range(40, 85))]
QUESTIONS = [[20, 21, 22], [50], [30, 32, 34, 36, 38, 40]]


def run(tiny, what, leg=NEWEST):
    arguments = tiny / "run/export", tiny / "document.safetensors", what, json.dumps(DOCUMENTS), json.dumps(QUESTIONS)
    return run_alone(SCRIPT, *arguments, modules=tiny / "modules", leg=leg)


def test_another_process_goes_on(tiny):
    compress(tiny, "--rank-k", 9, "--rank-v", 12, "--window", 4, "--sinks", 2, "--bits", 4, "--group", 4)
    read = run(tiny, "read")
    assert read["class"] == "CSKVCache"
    assert run(tiny, "ask") == read  # every logit of three questions, and of beams
    oldest = run(tiny, "ask", leg=OLDER[0])
    for ours, theirs in zip([*read["answers"], read["beams"]], [*oldest["answers"], oldest["beams"]], strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], abs=1e-3)
