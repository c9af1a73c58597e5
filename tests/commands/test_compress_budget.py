"""`cskv compress --budget`: the search and all stages behind it."""

import json

from tests.cli import compress, cskv, start_compress

FAST = "--windows", 2, "--rounds", 1, "--max-evals", 20


def test_the_same_as_the_verbs_one_by_one_and_reused(tiny):
    report = compress(tiny, "--budget", 0.8, "--window", 16, "--group", 16, *FAST)
    run = tiny / "run"
    assert report["group"] == 16 and report["window"] == 16
    assert report == {**compress(tiny), "checkpoint": report["checkpoint"]}  # nothing given: as it was made
    stamp = (run / "search" / "manifest.json").stat().st_mtime_ns
    cskv("init", "--run", run, "--allocation", "auto")
    quantized = cskv("quantize", "--run", run, "--allocation", "auto")
    assert quantized["bits_k"] == report["bits_k"]
    assert (run / "search" / "manifest.json").stat().st_mtime_ns == stamp
    assert cskv("export", "--run", run)["rank_v"] == report["rank_v"]
    uniform = compress(tiny, "--ratio-k", 0.5)  # ranks alone: the bits of the allocation go with it
    assert uniform["rank_k"] == [16] * 4 and uniform["group"] is None
    assert not (run / "quantize").exists() and (run / "search").exists()


def test_with_training_and_dry_run(tiny):
    flags = "--budget", 0.8, "--window", 16, "--group", 16, *FAST
    plan = compress(tiny, *flags, "--dry-run")
    assert plan["search"]["budget"] == 0.8 and not (tiny / "run" / "calibrate").exists()
    assert plan["cache_bytes_per_token"]["cskv"] == int(0.2 * 8192 * 4 * 128) * 2 / 8192
    report = compress(tiny, *flags, "--finetune", "distill", "--steps", 4)
    assert report["trained"] and (tiny / "run" / "finetune").exists()


def test_a_budget_and_ranks_or_bits_are_two_answers_to_one_question(tiny):
    compress(tiny, "--budget", 0.8, "--ratio-k", 0.5, exit_code=2)
    compress(tiny, "--budget", 0.8, "--bits", 4, exit_code=2)
    compress(tiny, "--budget", 0.8, "--bits-v", 4, exit_code=2)
    compress(tiny, "--rounds", 3, exit_code=2)
    assert "less than" in compress(tiny, "--budget", 0.999, exit_code=1)["error"]
    assert not (tiny / "run" / "calibrate").exists()


def test_two_processes_search_as_one(tiny):
    """The first searches while the other waits, then both go on."""
    flags = "--budget", 0.6, "--context", 256, *FAST
    one, two = (start_compress(tiny, tiny / str(count), *flags, processes=count) for count in (1, 2))
    for process in (one, two):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    chosen = [json.loads((tiny / name / "search" / "allocation.json").read_text())["layers"] for name in "12"]
    assert chosen[0] == chosen[1]
