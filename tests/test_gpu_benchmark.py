"""`benchmarks/gpu.py`, with a tiny model on a CPU."""

import json

import pytest
import torch

from benchmarks import gpu
from cskv_cli.modeling import cskv_decode, cskv_triton
from cskv_cli.modeling.cskv_decode import DecodeStep

TINY = "--shapes", "tiny", "--device", "cpu", "--context", "256", "--new-tokens", "2", "--memory", "2MB"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("cskv_cli.costs.SIZES", {"cpu": (64, 2**16)})
    monkeypatch.setattr("cskv_cli.costs.SECONDS", 0.01)


def test_rows_come_with_their_limits_and_the_largest_batch(tmp_path, monkeypatch, capsys):
    steps, call = [], DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda step, *args, **kw: steps.append(1) or call(step, *args, **kw))
    result = gpu.main([*TINY, "--minutes", "1", "--out", str(tmp_path / "gpu.json")])
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
    rows = {(row["cache"], row["bits"], row["groups"], row["batch"]): row for row in result["rows"]}
    alone = [(*key[:3],) for key in rows if key[3] == 1]
    assert alone == [
        *[("dynamic", 16, 1), ("cskv", 16, 1), ("cskv", 4, 1), ("static", 16, 1)],
        *[("cskv", 16, 4), ("cskv", 4, 4)],
    ]
    base, ours, codes = (rows[key] for key in [("dynamic", 16, 1, 1), ("cskv", 16, 1, 1), ("cskv", 4, 1, 1)])
    per_token = 2 * 64 * 2  # keys and values of a layer in bfloat16
    assert base["cache_bytes"] == pytest.approx(2 * 256 * per_token, rel=0.01)
    assert ours["cache_bytes"] == pytest.approx(2 * (256 * 2 * 13 * 2 + 36 * per_token) + 4 * 256, rel=0.01)
    assert codes["cache_bytes"] < ours["cache_bytes"] < base["cache_bytes"]
    for row in rows.values():
        assert row["reached"] == pytest.approx(row["limit"]["seconds"] / row["seconds"]["median"])
    most = {(entry["cache"], entry["bits"]): entry["batch"] for entry in result["largest_batch"]}
    assert most["cskv", 4] > most["cskv", 16] > most["dynamic", 16] > 1
    assert {("cskv", 16, 1, most["cskv", 16]), ("dynamic", 16, 1, most["dynamic", 16])} <= rows.keys()
    assert steps and cskv_decode.usable is cskv_triton.usable
    assert [entry["what"] for entry in result["skipped"]] == ["the Triton kernels"]
    assert capsys.readouterr().out.count("| tiny |") == len(result["rows"])


def test_what_time_does_not_allow_is_skipped():
    result = gpu.main([*TINY, "--minutes", "0"])
    assert not result["rows"] and {entry["why"] for entry in result["skipped"][1:]} == {"no time left"}


@pytest.mark.parametrize("limit, guess", [(1, 1), (7, 1), (7, 7), (7, 40), (0, 3), (100, 90)])
def test_the_largest_batch_is_found(limit, guess):
    tried = []
    found = gpu.largest(lambda batch: tried.append(batch) or batch <= limit, guess, lambda: True)
    assert limit - limit // 32 <= found <= limit and len(tried) == len(set(tried)) < 12
    assert gpu.largest(lambda batch: True, 4, iter([True, False]).__next__) == 4


def test_a_filled_cache_is_what_a_prefill_leaves():
    """In number and kind of tokens; their content is random."""
    subject = gpu.Subject("tiny", 100, "cpu", torch.float32)
    subject.take(gpu.Way("cskv", bits=4))
    with torch.inference_mode():
        cache = subject.filled(2)
        real = type(cache)(subject.model.config)
        subject.model(torch.ones(2, 100, dtype=torch.long), **{gpu.CACHE: real})
    for ours, theirs in zip(cache.layers, real.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == 100
        assert ours.exact.shape == theirs.exact.shape
        for mine, other in zip(ours.latents, theirs.latents, strict=True):
            assert mine.packed.codes.shape == other.packed.codes.shape
    assert torch.equal(*(next(iter(c.rotaries.values())).positions.expand(2, -1) for c in (cache, real)))
