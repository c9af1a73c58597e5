"""`cskv bench` on a tiny export."""

import pytest
import torch
from PIL import Image

from cskv_cli.eval_config import BenchConfig
from cskv_cli.evaluation.footprint import decoding_peak
from cskv_cli.evaluation.held import reachable_bytes
from cskv_cli.stages import bench as stage
from tests.cli import compress, cskv

MB = 2**20
SIZES = "--context", "40,64", "--batch", "1,2", "--new-tokens", 3, "--prefills", 2


@pytest.fixture
def export(tiny):
    compress(tiny, "--rank-k", 7, "--rank-v", 9, "--window", 8, "--sinks", 2)
    return tiny / "run" / "export"


@pytest.fixture
def alone(monkeypatch):
    """No processes of their own, which take seconds each."""
    monkeypatch.setattr(stage, "decoding_peak", lambda *args: None)


def test_rows_times_and_bytes(export, tmp_path, alone):
    result = cskv("bench", export, *SIZES, "--memory", "1MB", "--plot", tmp_path / "times.png")
    sizes = [(row["context"], row["batch"], row["cache"]) for row in result["rows"]]
    caches = "base", "cskv", "static"
    assert sizes == [(c, b, name) for c in (40, 64) for b in (1, 2) for name in caches]
    assert {"offloaded"} <= set(result["skipped"]) and all(result["skipped"].values())
    for row in result["rows"]:
        for seconds in (row["prefill_seconds"], row["decode_seconds"]):
            assert 0 < seconds["least"] <= seconds["median"] <= seconds["greatest"]
            assert row["cache"] != "base" or seconds["to_base"] == 1
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["decode_seconds"]["median"])
        assert row["memory"] is None
        held, tokens, batch = row["cache_bytes"]["held"], row["context"] + 3, row["batch"]
        full = 4 * batch * 64 * 4  # layers; keys and values of 32 channels in float32
        if row["cache"] in ("base", "static"):
            assert full * tokens <= held < full * tokens + 200
        else:
            exact = full * (8 + 2) + 4 * tokens
            assert row["cache_bytes"]["formula"] == 4 * batch * 16 * 4 * tokens + full * 10 + 4 * batch * tokens
            room = -(-tokens // 64) * 64
            assert 4 * batch * 16 * 4 * tokens + exact <= held <= 4 * batch * 16 * 4 * room + exact + 4 * batch * tokens
        limit = row["limit"]
        assert limit["reached"] == pytest.approx(limit["seconds"] / row["decode_seconds"]["median"])
        speed = result["machine"]["operations_per_second"], result["machine"]["bytes_per_second"]
        assert limit["seconds"] == pytest.approx(max(2 * limit["multiply_adds"] / speed[0], limit["bytes"] / speed[1]))
        assert row["cache"] == "cskv" or limit["to_base"] == 1
    assert result["longest"]["1"]["cskv"] > result["longest"]["2"]["cskv"] > result["longest"]["2"]["base"]
    assert Image.open(tmp_path / "times.png").width == 1300


def test_memory_is_that_of_a_process_of_its_own():
    idle, prefill, decode = decoding_peak(_hoard, 2 * MB, 300 * MB, 60 * MB).values()
    assert 290 * MB < prefill - idle < 340 * MB and 55 * MB < decode - idle < 90 * MB


def _hoard(*sizes):
    """Holds the first size, then for a while the second, then for a while the third."""
    held = [bytearray(sizes[0])]
    return (lambda: held.append(len(bytearray(sizes[1]))), lambda: held.append(len(bytearray(sizes[2]))))


def test_they_take_turns(export, monkeypatch, alone):
    order, timed = [], stage._timed

    def noted(model, ids, cache, seconds):
        order.append((type(cache).__name__, ids.shape[1]))
        return timed(model, ids, cache, seconds)

    monkeypatch.setattr(stage, "_timed", noted)
    cskv("bench", export, "--context", 20, "--new-tokens", 2, "--prefills", 2)
    turn = ["DynamicCache", "CSKVCache", "StaticCache"]
    assert order == [(name, n) for n in (20, 20, 1, 1) for name in turn]


def test_a_ratio_is_of_the_same_turn():
    spread = stage._spread([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert spread == {"median": 4.0, "least": 2.0, "greatest": 30.0, "to_base": 2.0}


def test_bytes_of_views_count_once_and_whole():
    whole = torch.zeros(100)
    assert reachable_bytes([whole[:10], {"a": whole[50:]}, torch.zeros(5, dtype=torch.uint8)]) == 405


@pytest.mark.parametrize("text, expected", [("8GB", 8 * 10**9), ("1.5 MB", 1_500_000), ("12B", 12)])
def test_memory_is_read(text, expected):
    assert BenchConfig(memory=text).memory_bytes == expected


def test_bad_input_is_told_before_any_work(export, monkeypatch):
    monkeypatch.setattr(stage, "load_checkpoint", lambda *args: 1 / 0)
    failure = cskv("bench", export, "--context", 300, exit_code=1)
    assert "256" in failure["error"] and "--context" in failure["hint"]
    cskv("bench", export, "--context", "10,many", exit_code=2)
    cskv("bench", export, "--batch", 0, exit_code=2)
    cskv("bench", export, "--memory", "much", exit_code=2)
    assert "nowhere" in cskv("bench", export, "--plot", "nowhere/x.png", exit_code=1)["error"]
