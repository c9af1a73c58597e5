"""`cskv sweep`: every combination once, nothing twice, and the same as the verbs give one by one."""

import json
import re
import signal
import time

import pytest
import yaml

from cskv_cli import recipes
from cskv_cli.errors import CskvError
from cskv_cli.evaluation import perplexity
from cskv_cli.sweep_report import curves, table
from cskv_cli.sweeps import combinations, read_sweep
from tests.cli import compress, cskv, start


def recipe(tiny, **changes):
    content = {
        "model": str(tiny / "base"),
        "calibrate": {"data": str(tiny / "text.txt"), "samples": 6, "seq_len": 48},
        "init": {"method": ["asvd", "whitened"], "ratio": [0.5, [0.75, 0.25]], "window": 8, "sinks": 2},
        "quantize": {"bits": [16, 4], "group": 8},
        "baselines": [{"method": ["streaming-llm", "h2o"], "ratio": [0.5]}, {"method": "kivi", "bits": [2]}],
        "eval": {"tasks": ["perplexity"], "data": str(tiny / "text.txt"), "samples": 2, "seq_len": 40},
    }
    path = tiny / "table.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_combinations():
    assert combinations({"a": [1, 2], "b": "x", "c": [[3, 4]]}) == [
        {"a": 1, "b": "x", "c": [3, 4]},
        {"a": 2, "b": "x", "c": [3, 4]},
    ]
    assert combinations({}) == [{}]


def test_a_section_may_be_several(tiny):
    parts = [{"method": "asvd", "sinks": 0, "ratio": [0.5, 0.75]}, {"method": "whitened", "ratio": 0.5}]
    cells = [cell for cell in read_sweep(recipe(tiny, init=parts, quantize={})).cells if cell.method == "cskv"]
    assert [cell.axes for cell in cells] == [
        {"method": "asvd", "sinks": 0, "ratio": 0.5},
        {"method": "asvd", "sinks": 0, "ratio": 0.75},
        {"method": "whitened", "ratio": 0.5},
    ]
    assert [cell.stages["init"]["sinks"] for cell in cells] == [0, 0, 4]


def test_every_combination_is_a_row_and_equals_what_the_verbs_give(tiny):
    result = cskv("sweep", recipe(tiny), "--out", tiny / "sweep")
    rows = [(row["method"], *row["axes"].values()) for row in result["rows"]]
    inits = [(m, r) for m in ("asvd", "whitened") for r in (0.5, [0.75, 0.25])]
    assert rows == [
        ("streaming-llm", 0.5),
        ("h2o", 0.5),
        ("kivi", 2),
        *[("cskv", m, r, 2, 8, bits, 8) for m, r in inits for bits in (16, 4)],
    ]
    scores = [row["tasks"]["perplexity"]["score"] for row in result["rows"]]
    assert [line["score"] for line in lines(tiny / "sweep")] == scores
    flags = "--data", tiny / "text.txt", "--samples", 2, "--seq-len", 40
    compress(tiny, "--method", "whitened", "--ratio-k", 0.75, "--ratio-v", 0.25, "--window", 8, "--sinks", 2)
    assert cskv("eval", tiny / "run" / "export", *flags)["score"] == scores[-2]
    compress(tiny, "--bits", 4, "--group", 8)
    assert cskv("eval", tiny / "run" / "export", *flags)["score"] == scores[-1]
    assert cskv("eval", tiny / "base", "--method", "kivi", "--bits", 2, *flags)["score"] == scores[2]
    markdown = (tiny / "sweep" / "table.md").read_text().splitlines()
    assert markdown[0].startswith("| method | ratio | bits | init |") and "| perplexity |" in markdown[0]
    assert len(markdown) == 2 + 11 and f"{scores[0]:.2f}" in markdown[2]
    assert (tiny / "sweep" / "perplexity.png").read_bytes().startswith(b"\x89PNG")


def test_training_is_a_column_like_any_other(tiny):
    settings = {"objective": ["none", "distill"], "steps": 4, "seq_len": 64}
    changes = {"baselines": [], "quantize": {}, "init": {"ratio": 0.8, "window": 8}, "finetune": settings}
    result = cskv("sweep", recipe(tiny, **changes), "--out", tiny / "sweep")
    assert [row["axes"]["objective"] for row in result["rows"]] == ["none", "distill"]
    plain, trained = (row["tasks"]["perplexity"]["score"] for row in result["rows"])
    run = "--run", tiny / "sweep" / "run"
    text = "--data", tiny / "text.txt", "--samples", 2, "--seq-len", 40
    assert cskv("eval", tiny / "sweep" / "run" / "export", *text)["score"] == trained != plain
    cskv("export", *run, "--factors", "init")
    assert cskv("eval", tiny / "sweep" / "run" / "export", *text)["score"] == plain


def test_a_second_run_repeats_nothing_and_a_new_value_only_itself(tiny, monkeypatch):
    scored = []
    real = perplexity.compare
    monkeypatch.setattr(perplexity, "compare", lambda methods, *rest: scored.append(methods) or real(methods, *rest))
    small = {"init": {"method": "whitened", "ratio": [0.5]}, "quantize": {}, "baselines": []}
    first = cskv("sweep", recipe(tiny, **small), "--out", tiny / "sweep")
    assert len(scored) == 1
    assert cskv("sweep", recipe(tiny, **small), "--out", tiny / "sweep") == first and len(scored) == 1
    more = small | {"init": {"method": "whitened", "ratio": [0.5, 0.75]}, "baselines": [{"method": "full"}]}
    second = cskv("sweep", recipe(tiny, **more), "--out", tiny / "sweep")
    assert len(scored) == 3 and [r for r in second["rows"] if r["axes"].get("ratio") == 0.5] == first["rows"]
    cskv("sweep", recipe(tiny, **more), "--out", tiny / "sweep", "--set", "eval.samples=1")
    assert len(scored) == 6  # another text: all of it anew
    (tiny / "text.txt").write_text((tiny / "text.txt").read_text()[::-1].replace("w", "w1 w"))
    cskv("sweep", recipe(tiny, **more), "--out", tiny / "sweep")
    assert len(scored) == 9  # calibrated on something else


def test_killed_and_run_again_repeats_no_finished_cell(tiny):
    path, folder = recipe(tiny), tiny / "killed"
    expected = cskv("sweep", path, "--out", tiny / "whole")["rows"]
    process = start("sweep", path, "--out", folder)
    while process.poll() is None and (not (folder / "results.jsonl").exists() or len(lines(folder)) < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (folder / "results.jsonl").read_text()
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"cell": "half a li')  # killed in the middle of a line
    assert 5 <= len(before.splitlines()) < 11
    process = start("sweep", path, "--out", folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    after = (folder / "results.jsonl").read_text()
    assert after.startswith(before) and len(lines(folder)) == 11
    scores = [[row["tasks"]["perplexity"]["score"] for row in rows] for rows in (expected, json.loads(output)["rows"])]
    assert scores[0] == scores[1]


def test_artifacts_that_do_not_change_are_made_once(tiny, monkeypatch):
    from cskv_cli.run import Run

    made = []
    real = Run.commit
    monkeypatch.setattr(Run, "commit", lambda run, stage, *rest: made.append(stage) or real(run, stage, *rest))
    cskv("sweep", recipe(tiny), "--out", tiny / "sweep")
    assert [made.count(stage) for stage in ("base", "calibrate", "init", "quantize", "export")] == [1, 1, 4, 4, 8]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"init": {"ratio": [0.5, 2]}}, "ratio_k"),
        ({"init": {"methods": "asvd"}}, "methods"),
        ({"quantize": {"bits": [5]}}, "bits_k"),
        ({"train": {}}, "no section 'train'"),
        ({"baselines": [{"method": "magic"}]}, "'magic' is none of streaming-llm"),
        ({"baselines": [{"method": "h2o", "bits": 4}]}, "h2o takes ratio, not bits"),
        ({"baselines": [{"method": "h2o", "ratio": [0.5, 1]}]}, "share removed"),
        ({"eval": {"entires": 4}}, "entires"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(tiny, changes, reason):
    failure = cskv("sweep", recipe(tiny, **changes), "--out", tiny / "sweep", exit_code=1)
    assert "table.yaml" in failure["error"] and reason in failure["error"]
    assert not (tiny / "sweep").exists()


def test_a_value_set_on_the_command_line(tiny):
    changed = read_sweep(recipe(tiny), ["eval.cases=8", "init.ratio=[0.5]", "model=other"])
    assert changed.eval.cases == 8 and changed.model == "other"
    assert [cell.axes["ratio"] for cell in changed.cells if cell.method == "cskv"] == [0.5] * 4
    several = read_sweep(recipe(tiny, init=[{"method": "asvd"}, {"method": "svd"}]), ["init.window=16"])
    assert [c.stages["init"]["window"] for c in several.cells if c.stages] == [16] * 4
    with pytest.raises(CskvError, match=r"SECTION.KEY=VALUE"):
        read_sweep(recipe(tiny), ["eval.cases"])


def test_ours_are_recipes_whose_every_row_is_valid():
    ours = [name for name in recipes.names() if re.search("paper-(table|figure)", name)]
    wanted = [*(f"table{n}" for n in range(1, 6)), "figure3", "figure4"]
    assert set(ours) == {f"{prefix}-{name}" for prefix in ("paper", "smollm2-paper") for name in wanted}
    for name in ours:
        assert read_sweep(recipes.find(name)).cells
        assert f"cskv sweep {name}" in recipes.find(name).read_text()
    assert "cskv sweep paper-table1" in cskv("compress", "--recipe", "paper-table1", exit_code=1)["hint"]


def row(method, axes, size, held, score):
    sizes = {"cache_bytes_per_token": {"base": 100, method: size}, "held_bytes_per_token": {"base": 100, method: held}}
    return {"method": method, "axes": axes, "tasks": {"retrieval": {"score": score, **sizes}}}


ROWS = [
    row("full", {}, 100, 100, 0.9),
    row("h2o", {"ratio": 0.5}, 50, 51, 0.5),
    row("h2o", {"ratio": 0.8}, 20, 21, 0.1),
    row("cskv", {"ratio": [0.75, 0.25], "method": "asvd", "sinks": 4}, 50, 55, 0.7),
    row("cskv", {"ratio": 0.5, "method": "asvd", "sinks": 4}, 50, 54, 0.6),
    row("cskv", {"ratio": 0.5, "method": "whitened", "sinks": 4}, 50, 54, 0.8),
]


def test_table():
    header, cells = table(ROWS)
    assert header == ["method", "ratio", "init", "sinks", "retrieval, found", "bytes per token", "share", "held"]
    assert cells[0] == ["full", "", "", "", "90.0%", "100", "100.0%", "100.0%"]
    assert cells[3] == ["CSKV", "0.75 / 0.25", "asvd", "4", "70.0%", "50", "50.0%", "55.0%"]


def test_a_line_for_each_method():
    assert curves(ROWS, "retrieval") == {
        "full": [(100, 0.9)],
        "h2o": [(21, 0.1), (51, 0.5)],
        "CSKV, method asvd, sinks 4": [(54, 0.6), (55, 0.7)],
        "CSKV, method whitened, sinks 4": [(54, 0.8)],
    }
