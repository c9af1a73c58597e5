"""`cskv eval` on a tiny export."""

import pytest

from tests.cli import compress, cskv

SIZES = "--samples", 2, "--seq-len", 40, "--entries", 5, "--cases", 3


@pytest.fixture
def export(tiny):
    compress(tiny, "--rank-k", 7, "--rank-v", 9, "--window", 8, "--sinks", 2)
    return tiny / "run" / "export"


def test_retrieval(export):
    result = cskv("eval", export, "--task", "retrieval", *SIZES)
    assert result == {
        "task": "retrieval",
        "entries": 5,
        "cases": 3,
        "base": {"score": 0.0},
        "cskv": {"score": 0.0},
        "cache_bytes_per_token": {"base": 4 * 64 * 4, "cskv": 4 * 16 * 4 + 4},
        "notes": [],
    }


def test_perplexity_is_the_default(export, tiny):
    data = "--data", tiny / "text.txt"
    result = cskv("eval", export, *data, *SIZES)
    assert result == cskv("eval", export, "--task", "perplexity", *data, *SIZES)
    assert result["task"] == "perplexity" and result["tokens"] == 2 * 39
    assert result["cskv"]["perplexity"] != result["base"]["perplexity"]
    assert result["kl"] > 0 and 0 <= result["top1_agreement"] <= 1
    assert result["cache_bytes_per_token"] == {"base": 4 * 64 * 4, "cskv": 4 * 16 * 4 + 4}
    assert result["notes"] == []


def test_several_tasks_are_those_tasks_in_order_each_once(export, tiny):
    given = "--data", tiny / "text.txt", *SIZES
    names = "retrieval", "perplexity"
    flags = [part for name in (*names, names[0]) for part in ("--task", name)]
    alone = [cskv("eval", export, "--task", name, *given) for name in names]
    assert cskv("eval", export, *flags, *given) == {"tasks": alone}


def test_text_that_was_not_chosen_is_told(export):
    (note,) = cskv("eval", export, *SIZES)["notes"]
    assert "--data" in note


def test_usage_errors_exit_with_2(export):
    cskv("eval", export, "--task", "magic", exit_code=2)
    cskv("eval", export, "--entries", 1, exit_code=2)


def test_lists_too_long_are_one_clear_line(export):
    failure = cskv("eval", export, "--task", "retrieval", "--entries", 200, exit_code=1)
    assert "model 256" in failure["error"] and "--entries" in failure["hint"]
