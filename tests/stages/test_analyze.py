"""`analyze` on a tiny model whose attention inputs are known."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

from cskv_cli import statistics
from cskv_cli.errors import CskvError
from cskv_cli.progress import SILENT
from cskv_cli.run import Run
from cskv_cli.spectrum import Spectrum, cache_spectrum, rank_at
from cskv_cli.stages.analyze import (
    HEADER,
    AnalyzeConfig,
    advise,
    affordable,
    analyze,
    describe,
    load_report,
    rows,
)

HIDDEN = 24
FULL = [0, 2, 3, 4]  # layer 1 looks at a sliding window
CALIBRATE = SimpleNamespace(digest="c")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SimpleNamespace:
    """A saved Qwen2, which has biases, and its modules."""
    config = transformers.Qwen2Config(
        vocab_size=31,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["sliding_attention" if i not in FULL else "full_attention" for i in range(5)],
        use_sliding_window=True,
        sliding_window=8,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return SimpleNamespace(folder=folder, attention=[layer.self_attn for layer in model.model.layers])


def inputs(layer: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(tokens, HIDDEN, generator=generator) * torch.logspace(0, -1, HIDDEN)


def calibrated(path, tokens=100) -> Run:
    folder = path / "calibrate"
    folder.mkdir(parents=True)
    for i in FULL:
        x = inputs(i, tokens)
        kept = statistics.LayerStatistics(x.T @ x, x.mean(0), x.abs().mean(0), x[None, :8].clone(), tokens)
        statistics.save_layer(folder, i, kept)
    return Run(path)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Run:
    run = calibrated(tmp_path_factory.mktemp("runs") / "run")
    analyze(run, model, CALIBRATE, SILENT)
    return run


def test_the_report_describes_the_caches_of_the_layers_that_grow(run, model):
    report = load_report(run.folder("analyze"))
    assert [layer["index"] for layer in report["layers"]] == FULL
    assert report["channels"] == 12
    for layer in report["layers"]:
        for name in "kv":
            weight = getattr(model.attention[layer["index"]], f"{name}_proj").weight.detach().T.double()
            cache = inputs(layer["index"], 100).double() @ weight
            u, s, vh = torch.linalg.svd(cache, full_matrices=False)
            numbers = layer[name]
            torch.testing.assert_close(
                torch.tensor(numbers["singular_values"], dtype=torch.float64), s, rtol=1e-5, atol=0
            )
            energy = (s**2).cumsum(0) / (s**2).sum()
            for percent in (90, 95, 99):
                rank = numbers[f"rank_{percent}"]
                assert energy[rank - 1] >= percent / 100 > (energy[rank - 2] if rank > 1 else 0)
            assert list(numbers["relative_error"]) == ["0.5", "0.6", "0.7", "0.8", "0.9"]
            for ratio, error in numbers["relative_error"].items():
                r = rank_at(float(ratio), 12)
                lost = (cache - u[:, :r] * s[:r] @ vh[:r]).norm() / cache.norm()
                assert error == pytest.approx(float(lost), rel=1e-5)


def test_the_stage_holds_the_report_and_three_figures(run):
    manifest = run.manifest("analyze")
    assert set(manifest.files) == {"report.json", "spectrum-layer-3.png", "energy.png", "rank-map.png"}
    assert manifest.inputs == {"calibrate": "c"}
    assert manifest.config == AnalyzeConfig().model_dump()
    report = json.loads((run.folder("analyze") / "report.json").read_text())
    assert manifest.report == {key: report[key] for key in ("advised_ratio", "advice")}
    assert {path.name for path in run.path.iterdir()} == {"calibrate", "analyze"}


def test_a_second_time_gives_the_same_bytes_whatever_was_left_lying(run, model):
    before = run.manifest("analyze").files
    leftover = run.partial("analyze", {"calibrate": "c"})
    leftover.mkdir()
    (leftover / "half.png").write_bytes(b"")
    assert analyze(run, model, CALIBRATE, SILENT).files == before


def test_rows_are_what_the_report_says(run):
    report = load_report(run.folder("analyze"))
    table = rows(report)
    assert {len(row) for row in table} == {len(HEADER)}
    k, v = report["layers"][1]["k"], report["layers"][1]["v"]
    assert table[1][0] == "2"
    assert table[1][1] == f"{k['effective_rank']:.1f}"
    assert table[1][2] == f"{k['rank_90']}/{k['rank_95']}/{k['rank_99']}"
    assert table[1][3] == f"{100 * k['relative_error']['0.5']:.1f}/{100 * k['relative_error']['0.8']:.1f}"
    assert table[1][5] == f"{v['rank_90']}/{v['rank_95']}/{v['rank_99']}"


def test_too_few_tokens_are_told(model, tmp_path):
    enough, few = (calibrated(tmp_path / str(tokens), tokens) for tokens in (HIDDEN, HIDDEN - 1))
    assert "Calibrated on 23 tokens" in analyze(few, model, CALIBRATE, SILENT).report["advice"][-1]
    assert "Calibrated" not in " ".join(analyze(enough, model, CALIBRATE, SILENT).report["advice"])


def test_missing_statistics_are_named_and_nothing_is_left_as_a_stage(model, tmp_path):
    run = calibrated(tmp_path / "run")
    statistics.layer_file(run.folder("calibrate"), 2).unlink()
    with pytest.raises(CskvError, match="layer 2"):
        analyze(run, model, CALIBRATE, SILENT)
    assert run.manifest("analyze") is None


def rank_one_and(rest: float, channels: int = 20) -> Spectrum:
    """A spectrum whose energy is 1 in the first direction and `rest` in all others together."""
    squares = torch.full((channels,), rest / (channels - 1), dtype=torch.float64)
    squares[0] = 1
    return Spectrum(squares.sqrt())


def test_affordable_is_the_last_ratio_within_the_error():
    caches = [rank_one_and(0.1), rank_one_and(0.01)]
    errors = {step / 20: sum(cache.relative_error(step / 20) for cache in caches) / 2 for step in range(1, 19)}
    for allowed in (0.05, 0.1, 0.15):
        assert affordable(caches, allowed) == max(ratio for ratio, error in errors.items() if error <= allowed)
    assert affordable(caches, errors[0.35]) == 0.35
    assert affordable(caches, 1) == 0.9
    assert affordable([rank_one_and(19)], 0.2) == 0


def advice_for(k: list[float], v: list[float], path="cskv-run") -> list[str]:
    spectra = {i: {"k": rank_one_and(a), "v": rank_one_and(b)} for i, (a, b) in enumerate(zip(k, v, strict=True))}
    ratios = {name: affordable([pair[name] for pair in spectra.values()], 0.2) for name in "kv"}
    return advise(spectra, ratios, path)


def test_advice_says_what_compresses_better_and_where_it_is_hardest():
    comparison, allowed, hardest, following = advice_for([0.1, 0.1, 0.1, 0.4, 0.1, 0.2], [0.3] * 3 + [0.35] * 3)
    assert comparison.startswith("Keys compress better than values in 5 of 6 layers")
    assert [word for word in hardest.replace("(", "").split() if word.isdigit()] == ["3", "5", "4"]
    k = [rank_one_and(rest) for rest in (0.1, 0.1, 0.1, 0.4, 0.1, 0.2)]
    v = [rank_one_and(rest) for rest in [0.3] * 3 + [0.35] * 3]
    careful, bold = ([affordable(k, error), affordable(v, error)] for error in (0.1, 0.2))
    assert [float(word.strip(".;")) for word in allowed.split() if word[0].isdigit()] == [10, *careful, 20, *bold]
    kept = (rank_at(bold[0], 20) + rank_at(bold[1], 20)) / 40
    assert f"cskv compress --run cskv-run --ratio-k {bold[0]:g} --ratio-v {bold[1]:g} " in following
    assert f"keeps {100 * kept:g} %" in following


def test_advice_says_when_values_compress_better():
    assert advice_for([0.3, 0.1], [0.1, 0.05])[0].startswith("Values compress better than keys in 2 of 2 layers")


def test_advice_quotes_the_run_directory():
    assert "--run 'my run' " in advice_for([0.1], [0.1], "my run")[-1]


def test_advice_for_caches_of_full_rank_names_no_ratio():
    _, flat = advice_for([19], [19])
    assert f"{100 * rank_one_and(19).relative_error(0.5):.1f} % for keys" in flat
    assert "cskv compress" not in flat


def test_numbers_are_those_of_the_spectrum():
    cache = cache_spectrum(torch.diag(torch.tensor([100.0, 10.0, 1.0, 0.1])), torch.eye(4))
    numbers = describe({7: {"k": cache, "v": cache}})["layers"][0]["k"]
    assert [numbers[f"rank_{percent}"] for percent in (90, 95, 99)] == [1, 2, 2]
    assert numbers["effective_rank"] == cache.effective_rank
