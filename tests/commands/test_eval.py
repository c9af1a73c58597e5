"""`cskv eval` on a tiny export."""

import shutil

import pytest
from huggingface_hub import ModelCard

from tests.cli import compress, cskv
from tests.families import base_model

SIZES = "--samples", 2, "--seq-len", 40, "--entries", 5, "--cases", 3


@pytest.fixture
def export(tiny):
    compress(tiny, "--rank-k", 7, "--rank-v", 9, "--window", 8, "--sinks", 2)
    return tiny / "run" / "export"


def test_retrieval(export):
    result = cskv("eval", export, "--task", "retrieval", *SIZES, "--entries", 12)
    held = result.pop("held_bytes_per_token")
    assert held["base"] == 4 * 64 * 4 and 0 < held["cskv"] < held["base"]
    (entry,) = result.pop("results")
    assert entry == result | {"held_bytes_per_token": held}
    assert result == {
        "task": "retrieval",
        "model": str(export),
        "method": "cskv",
        "score": 0.0,
        "entries": 12,
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
    assert result["score"] == result["cskv"]["perplexity"]
    assert result["kl"] > 0 and 0 <= result["top1_agreement"] <= 1
    assert result["cache_bytes_per_token"] == {"base": 4 * 64 * 4, "cskv": 4 * 16 * 4 + 4}
    assert result["held_bytes_per_token"]["cskv"] == (40 * (4 * 16 * 4 + 4) + 10 * 4 * 64 * 4) / 40
    assert result["notes"] == []


def test_several_tasks_are_those_tasks_in_order_each_once(export, tiny):
    given = "--data", tiny / "text.txt", *SIZES
    names = "retrieval", "perplexity"
    alone = [entry for name in names for entry in cskv("eval", export, "--task", name, *given)["results"]]
    flags = [part for name in (*names, names[0]) for part in ("--task", name)]
    assert cskv("eval", export, *flags, *given) == {"results": alone}
    assert cskv("eval", export, "--task", "retrieval, perplexity", *given) == {"results": alone}


BASELINES = {"full": {}, "streaming-llm": {"ratio": 0.6}, "h2o": {"ratio": 0.6}, "kivi": {"bits": 2}}
BASELINES |= {"asvd": {"ratio": 0.6}, "svd-cache": {"ratio": 0.6}}


@pytest.mark.parametrize("subject", ["run/export", "base"])
def test_every_baseline_on_an_export_and_on_a_base(export, tiny, subject):
    given = "--data", tiny / "text.txt", "--run", tiny / "run", *SIZES, "--ratio", 0.6, "--bits", 2
    results = cskv("eval", tiny / subject, "--task", "perplexity,retrieval", "--method", ",".join(BASELINES), *given)
    results = results["results"]
    assert [(r["task"], r["method"]) for r in results] == [
        (t, m) for t in ("perplexity", "retrieval") for m in BASELINES
    ]
    for result in results:
        name, size = result["method"], result["cache_bytes_per_token"]
        assert BASELINES[name] == {key: result[key] for key in ("ratio", "bits") if key in result}
        assert size["base"] == 1024 and set(result[name]) == set(result["base"])
        assert (size[name] == 1024) if name == "full" else (size[name] < 1024)
    first = results[0]
    assert first["kl"] == 0 and first["full"] == first["base"]
    assert [result["kl"] > 1e-4 for result in results[1:6]] == [
        True,
        True,
        True,
        True,
        False,
    ]  # its block is 128 tokens


def test_a_baseline_on_an_export_is_that_on_its_base(export, tiny):
    """Decoded in another order than the base's own windows, so up to rounding."""
    given = "--data", tiny / "text.txt", "--method", "h2o", *SIZES
    scores = [cskv("eval", tiny / subject, *given)["score"] for subject in ("run/export", "base")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_several_budgets_and_several_exports(export, tiny):
    compress(tiny, "--rank-k", 3, "--rank-v", 3, "--window", 8, "--out", tiny / "other")
    given = "--data", tiny / "text.txt", *SIZES
    flags = "--method", "cskv,streaming-llm", "--ratio", 0.5, "--ratio", 0.8
    results = cskv("eval", export, tiny / "other", *flags, *given)["results"]
    assert [r["model"] for r in results] == [str(export), str(tiny / "other"), str(export), str(export)]
    assert [r.get("ratio") for r in results] == [None, None, 0.5, 0.8]
    alone = [cskv("eval", folder, *given)["results"][0] for folder in (export, tiny / "other")]
    assert results[:2] == alone


def test_models_of_different_bases_are_refused(export, tiny):
    base_model("Llama", num_hidden_layers=2).save_pretrained(tiny / "base")
    other = tiny / "second"
    other.mkdir()
    (tiny / "base").rename(other / "base")
    (other / "text.txt").write_text((tiny / "text.txt").read_text())
    compress(other)
    failure = cskv("eval", export, other / "run" / "export", *SIZES, "--task", "retrieval", exit_code=1)
    assert "different base weights" in failure["error"]


def test_what_is_missing_is_said_with_what_to_do(export, tiny):
    failure = cskv("eval", tiny / "base", exit_code=1)
    assert "not a CSKV checkpoint" in failure["error"] and "--method full" in failure["hint"]
    failure = cskv("eval", export, "--method", "asvd", "--run", tiny / "none", exit_code=1)
    assert "cskv calibrate" in failure["hint"]
    assert "no such file" in cskv("eval", tiny / "nothing", "--method", "full", exit_code=1)["error"]


def test_text_that_was_not_chosen_is_told(export):
    (note,) = cskv("eval", export, *SIZES)["notes"]
    assert "--data" in note


def test_usage_errors_exit_with_2(export):
    cskv("eval", export, "--task", "magic", exit_code=2)
    cskv("eval", export, "--entries", 1, exit_code=2)
    cskv("eval", export, "--method", "magic", exit_code=2)
    cskv("eval", export, "--ratio", 1, exit_code=2)
    cskv("eval", export, "--bits", 5, exit_code=2)


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


@pytest.fixture
def benchmarks(tiny):
    """A few rows of each benchmark, in its own format."""
    import json

    text = (tiny / "text.txt").read_text().split()
    row = {"input": "w1 w2", "context": " ".join(text[:400]), "answers": ["w3"], "length": 100}
    for name, file in (("longbench", "qasper_e.jsonl"), ("lveval", "factrecall_en_16k.jsonl")):
        (tiny / name).mkdir()
        (tiny / name / file).write_text(json.dumps(row) + "\n" + json.dumps(row | {"context": "w5 w6"}) + "\n")
    (tiny / "mmlu").mkdir()
    for split in ("dev", "test"):
        (tiny / "mmlu" / f"x_{split}.csv").write_text("w1 w2,w3,w4,w5,w6,A\nw7 w8,w3,w4,w5,w6,B\n")
    return tiny


def test_benchmarks_from_local_files(export, benchmarks):
    tasks = ",".join(f"{name}:{benchmarks / name}" for name in ("longbench", "lveval", "mmlu"))
    flags = "--method", "cskv,streaming-llm,h2o", "--lines", 2, "--cases", 2
    results = cskv("eval", export, "--task", f"{tasks},longeval", *flags)["results"]
    names = ["longbench", "lveval", "mmlu", "longeval"]
    assert [r["task"] for r in results] == [name for name in names for _ in range(3)]
    for result in results:
        name = result["method"]
        assert result["score"] == result[name]["score"] and result["cases"] == 2
        assert 0 <= result["score"] <= 1 and 0 <= result["base"]["score"] <= 1
        assert result["held_bytes_per_token"][name] < result["held_bytes_per_token"]["base"]
    assert [r["cut"] for r in results[:6]] == [2, 2, 2, 1, 1, 1]  # the model's context is 256 tokens
    assert "cut" in results[0]["notes"][0]
    assert results[0]["cskv"]["parts"]["qasper"]["by_length"].keys() == {"0-4k"}
    assert results[6]["base"]["parts"] == {"x": {"score": 0.5, "cases": 2}}  # all letters are one unknown token


def test_a_benchmark_that_is_not_there_is_said_before_a_model_is_loaded(export, benchmarks, monkeypatch):
    failure = cskv("eval", export, "--task", f"longbench:{benchmarks}/nothing", exit_code=1)
    assert "no such file or folder" in failure["error"] and "--task longbench:" in failure["hint"]
    failure = cskv("eval", export, "--task", f"longbench:{benchmarks}/mmlu", exit_code=1)
    assert "holds none of qasper_e.jsonl" in failure["error"]
    failure = cskv("eval", export, "--task", "longbench", exit_code=1)
    assert "cannot be downloaded" in failure["error"]
    cskv("eval", export, "--task", "perplexity:x", exit_code=2)
