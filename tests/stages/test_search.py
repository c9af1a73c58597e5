"""The search as a user runs it: the budget, resuming, what its allocation becomes, and a layer that matters."""

import json
import shutil

import pytest
import torch

from cskv_cli.checkpoint.load import load_checkpoint
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.modeling_cskv import CACHE
from cskv_cli.search.simulator import Simulator
from tests.cli import CALIBRATION, cskv
from tests.families import base_model
from tests.test_memory import held_bytes

FAST = "--seq-len", 96, "--windows", 2, "--rounds", 2
TOKENS = 8192


def calibrated(tiny, model=None):
    """A run directory of the tiny model in bfloat16."""
    model = model or base_model("Llama", max_position_embeddings=2 * TOKENS)
    model.to(torch.bfloat16).save_pretrained(tiny / "base")
    run = tiny / "run"
    cskv("calibrate", tiny / "base", "--run", run, "--data", tiny / "text.txt", *CALIBRATION)
    return run


def export(run, allocation="auto"):
    """Through init and quantize to the checkpoint; their reports."""
    parts = [cskv(verb, "--run", run, "--allocation", allocation) for verb in ("init", "quantize")]
    return [*parts, cskv("export", "--run", run)]


def bytes_in_a_real_cache(folder):
    """What the cache of a checkpoint holds after TOKENS tokens, whole layers included."""
    model = load_checkpoint(folder, "cpu", torch.bfloat16)
    cache = CSKVCache(model.config)
    with torch.inference_mode():
        for ids in torch.randint(3, 97, (1, TOKENS)).split([TOKENS - 70, *[1] * 70], dim=1):
            model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return held_bytes(cache)


def test_the_budget_is_what_a_real_cache_holds_and_search_is_no_worse_than_uniform(tiny):
    run = calibrated(tiny)
    report = cskv("search", "--run", run, "--budget", 0.85, *FAST)
    base = TOKENS * 4 * 64 * 2
    assert report["base_bytes"] == base and report["budget_bytes"] == int(0.15 * base)
    best = report["best"]
    assert all(best["kl"] <= line["kl"] for line in report["settings"])
    assert {line["kind"] for line in report["settings"]} == {"uniform", "search"}
    assert all(line["bytes"] <= report["budget_bytes"] for line in report["settings"])
    export(run)
    held = bytes_in_a_real_cache(run / "export")
    assert held == pytest.approx(0.15 * base, rel=0.01) and held == pytest.approx(best["bytes"], rel=0.002)
    for name in ("allocation.png", "front.png"):
        assert (run / "search" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, expected",
    [
        (("--bytes-per-token", 100), 100 * TOKENS),
        (("--memory", "0.5MB", "--context", "8k"), 500_000),
        (("--memory", "512KiB", "--context", "4k"), 512 * 1024),
    ],
)
def test_other_ways_to_say_a_budget(tiny, flags, expected):
    run = calibrated(tiny)
    plan = cskv("search", "--run", run, *flags, *FAST, "--dry-run")
    assert plan["budget_bytes"] == expected
    assert (plan["candidates"], plan["already_measured"], plan["settings_to_verify"]) == (24, 0, 6)
    assert plan["estimated_seconds"] > 0 and not (run / "search").exists()


def test_a_killed_search_goes_on_and_measures_nothing_twice(tiny, monkeypatch):
    run = calibrated(tiny)
    calls, divergence = [], Simulator.divergence

    def counted(self, setting, window, exact):
        calls.append((sorted(setting.items(), key=str), window.ids.tolist()))
        if len(calls) == stop:
            raise KeyboardInterrupt
        return divergence(self, setting, window, exact)

    monkeypatch.setattr(Simulator, "divergence", counted)
    stop = 30
    cskv("search", "--run", run, "--budget", 0.85, *FAST, exit_code=130)
    stop = None
    whole = cskv("search", "--run", run, "--budget", 0.85, *FAST)
    assert calls[29] == calls[31]  # the pair of windows that was cut in two is measured again, nothing else
    before = len(calls)
    assert before == 2 * 24 + 9 * len(whole["settings"]) + 2
    other = cskv("search", "--run", run, "--budget", 0.8, *FAST)  # only combinations are measured for another budget
    assert other["measurements_made"] <= 6 and len(calls) - before == 9 * other["measurements_made"]
    again = cskv("search", "--run", run, "--budget", 0.85, *FAST)
    assert again["measurements_made"] == 0 and again["best"] == whole["best"]


def test_max_evals_limits_the_measurements_and_a_later_call_makes_the_rest(tiny):
    run = calibrated(tiny)
    few = cskv("search", "--run", run, "--budget", 0.85, *FAST, "--max-evals", 10)
    assert few["measurements_made"] <= 10 and {line["kind"] for line in few["settings"]} == {"uniform", "search"}
    rest = cskv("search", "--run", run, "--budget", 0.85, *FAST)
    shutil.rmtree(run / "search")
    fresh = cskv("search", "--run", run, "--budget", 0.85, *FAST)
    assert rest["best"] == fresh["best"] and rest["measurements_made"] < fresh["measurements_made"]


def test_a_layer_that_matters_gets_more_bytes(tiny):
    """Keys and values of layer 2: of a flat spectrum, with a large output; those of the others as they were."""
    model = base_model("Llama", max_position_embeddings=2 * TOKENS)
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            for projection in (attention.k_proj, attention.v_proj):
                u, s, v = torch.linalg.svd(projection.weight, full_matrices=False)
                spectrum = torch.ones_like(s) if i == 2 else 0.5 ** torch.arange(len(s))
                projection.weight.copy_(u * (spectrum * s.norm() / spectrum.norm()) @ v)
            attention.o_proj.weight.mul_(3.0 if i == 2 else 0.5)
    report = cskv("search", "--run", calibrated(tiny, model), "--budget", 0.85, *FAST, "--rounds", 0)
    first = next(line for line in report["settings"] if line["label"] == "first")
    k, v = first["setting"].removeprefix("all k ").split(" v ")
    bits = [[int(rank) * int(bits) for rank, bits in (t.split("/") for t in texts.split())] for texts in (k, v)]
    assert all(line[2] == max(line) for line in bits)
    both = [sum(layer) for layer in zip(*bits, strict=True)]
    assert both[2] > 1.5 * max(both[:2] + both[3:])


def edited(run, **changes):
    """The search's allocation with some layers replaced, in a file beside the run."""
    content = json.loads((run / "search" / "allocation.json").read_text())
    for index, layer in changes.items():
        content["layers"][int(index[1:])] |= layer
    path = run.parent / "mine.json"
    path.write_text(json.dumps(content))
    return path


def test_an_edited_allocation_is_honoured_everywhere(tiny):
    run = calibrated(tiny)
    cskv("search", "--run", run, "--budget", 0.85, *FAST, "--rounds", 0)
    mine = edited(
        run,
        l0={"k": {"rank": 5, "bits": None}, "v": {"rank": 11, "bits": 3}},
        l1={"k": None, "v": None},
        l2={"k": {"rank": 7, "bits": 2}, "v": {"rank": 32, "bits": None}},
        l3={"k": {"rank": 9, "bits": 8}, "v": {"rank": 10, "bits": 4}},
    )
    made, quantized, report = export(run, mine)
    assert made["rank_k"] == report["rank_k"] == [5, None, 7, 9]
    assert made["rank_v"] == report["rank_v"] == [11, None, 32, 10]
    assert quantized["bits_k"] == report["bits_k"] == [None, None, 2, 8]
    assert quantized["bits_v"] == report["bits_v"] == [3, None, None, 4]
    per_token = 4 + 128 + 5 * 2 + 7 * (2 * 32 / 8 + 4) / 32 + 9 * (8 * 32 / 8 + 4) / 32
    per_token += (-(-11 * 3 // 8) + 4) + 32 * 2 + (5 + 4)
    assert report["cache_bytes_per_token"] == {"base": 4 * 128, "cskv": per_token}
    expected = per_token * TOKENS + 3 * 36 * 128
    assert bytes_in_a_real_cache(run / "export") == pytest.approx(expected, rel=0.002)
    assert cskv("inspect", run / "export")["cache_bytes_per_token"] == report["cache_bytes_per_token"]
    mine.write_text(mine.read_text().replace('"rank": 5', '"rank": 6'))
    failure = cskv("quantize", "--run", run, "--allocation", mine, exit_code=1)
    assert "layer 0" in failure["error"] and "rank 6 for k" in failure["error"] and "cskv init" in failure["hint"]
    assert cskv("init", "--run", run, "--allocation", mine)["rank_k"] == [6, None, 7, 9]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"l1": {"k": {"rank": 33, "bits": 4}}}, "layer 1: rank 33 of k is more than the 32 channels"),
        ({"l2": {"v": {"rank": 3, "bits": 5}}}, "layer 2: v.bits"),
        ({"l2": {"v": None}}, "layer 2: it: k and v must both be given"),
        ({"l3": {"index": 7}}, "layer 7 is none of this model's"),
        ({"l3": {"index": 2}}, "layer 3 is missing"),
    ],
)
def test_a_bad_allocation_is_one_clear_error(tiny, change, said):
    run = calibrated(tiny)
    cskv("search", "--run", run, "--budget", 0.85, *FAST, "--rounds", 0, "--max-evals", 4)
    failure = cskv("init", "--run", run, "--allocation", edited(run, **change), exit_code=1)
    assert said in failure["error"] and "mine.json" in failure["error"]


def test_an_allocation_edited_in_place_is_refused(tiny):
    run = calibrated(tiny)
    assert "no search yet" in cskv("init", "--run", run, "--allocation", "auto", exit_code=1)["error"]
    cskv("search", "--run", run, "--budget", 0.85, *FAST, "--rounds", 0, "--max-evals", 4)
    path = run / "search" / "allocation.json"
    path.write_text(path.read_text().replace('"window"', ' "window"'))
    failure = cskv("init", "--run", run, "--allocation", "auto", exit_code=1)
    assert "was edited" in failure["error"] and "--allocation" in failure["hint"]


def test_bad_budgets_are_refused_before_any_work(tiny):
    run = calibrated(tiny)
    assert "less than" in cskv("search", "--run", run, "--budget", 0.999, exit_code=1)["error"]
    assert "nothing to compress" in cskv("search", "--run", run, "--memory", "1GB", exit_code=1)["error"]
    cskv("search", "--run", run, exit_code=2)
    cskv("search", "--run", run, "--budget", 0.9, "--memory", "1GB", exit_code=2)
    cskv("search", "--run", run, "--memory", "8 cows", exit_code=2)
    cskv("search", "--run", run, "--budget", 0.9, "--group", 64, exit_code=2)
    cskv("init", "--run", run, "--allocation", "auto", "--rank-k", 4, exit_code=2)
    assert not list(run.glob(".search-*"))
