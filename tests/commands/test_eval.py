"""`cskv eval` on a tiny export."""

import shutil

import pytest
from huggingface_hub import ModelCard

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


def test_gates(export, tiny):
    given = "--data", tiny / "text.txt", *SIZES
    result = cskv("eval", export, *given)
    ratio = result["cskv"]["perplexity"] / result["base"]["perplexity"]
    tokens, layers, channels = 8192, 4, 32
    ours = layers * (tokens * (7 + 9) + (8 + 2) * 2 * channels) * 4 + 4 * tokens
    removed = 1 - ours / (layers * tokens * 2 * channels * 4)
    passing = "--fail-under", f"perplexity_ratio<={ratio}", "--fail-under", f"compression>={removed}"
    checked = cskv("eval", export, *given, *passing)
    assert [gate["value"] for gate in checked.pop("fail_under")] == pytest.approx([ratio, removed], rel=1e-6)
    assert checked == result
    failed = cskv("eval", export, *given, *passing, "--fail-under", "compression>=0.99", exit_code=3)
    assert [gate["passed"] for gate in failed["fail_under"]] == [True, True, False]


def test_a_gate_on_what_is_not_measured_is_refused_before_the_work(tmp_path):
    for condition, reason in [("retrieval>=0.5", "not measured"), ("speed>=1", "not measured"), ("kl", "condition")]:
        assert reason in cskv("eval", tmp_path / "none", "--fail-under", condition, exit_code=2)["error"]


def test_results_are_kept_for_the_card_until_the_export_changes(export, tiny):
    run = tiny / "run"
    given = "--data", tiny / "text.txt", *SIZES
    assert "## Quality" not in cskv("export", "--run", run, "--card")["card"]
    result = cskv("eval", export, *given)
    found = cskv("eval", export, "--task", "retrieval", *given)
    card = cskv("export", "--run", run, "--card")["card"]
    assert f"| perplexity, 78 tokens of text.txt | {result['base']['perplexity']:.2f} |" in card
    assert f"| KL per token, 78 tokens of text.txt | 0 | {result['kl']:.4f} |" in card
    assert f"| retrieval, 3 cases of 5 entries | {found['base']['score']:.3g} | {found['cskv']['score']:.3g} |" in card
    metrics = metadata_of(card)["model-index"][0]["results"]
    values = [metric["value"] for entry in metrics for metric in entry["metrics"]]
    assert values == [round(result["cskv"]["perplexity"], 4), found["cskv"]["score"]]
    assert str(tiny) not in card
    cskv("compress", "--run", run, "--rank-k", 6, "--rank-v", 9, "--window", 8, "--sinks", 2)
    assert "## Quality" not in cskv("export", "--run", run, "--card")["card"]
    copy = shutil.copytree(export, tiny / "copy")
    cskv("eval", copy, *given)
    assert "## Quality" not in cskv("export", "--run", run, "--card")["card"]


def metadata_of(card):
    """The front matter, as huggingface_hub reads it."""
    return ModelCard(card).data.to_dict()
