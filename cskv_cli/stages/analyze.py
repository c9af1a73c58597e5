"""`cskv analyze`: where the K and V caches are redundant."""

import json
import shlex
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from cskv_cli import statistics
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.layers import compressible_layers, in_memory, kv_projections, load_by_layer
from cskv_cli.config import StageConfig
from cskv_cli.modeling.cskv_structure import attentions
from cskv_cli.plots import Spectra, plot_energy, plot_ranks, plot_spectrum
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run, write_json
from cskv_cli.spectrum import ENERGIES, Spectrum, cache_spectrum, rank_at

REPORT = "report.json"
HEADER = (
    "layer",
    *(f"{x} {what}" for x in "KV" for what in ("eff.\nrank", "rank for\n90/95/99 %", "error at\n0.5/0.8, %")),
)
RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9)
CAREFUL, BOLD = 0.1, 0.2
"""Expected relative errors that the advice calls small, and still bearable; the second one sets the ratios advised."""
_GRID = [step / 20 for step in range(1, 19)]


class AnalyzeConfig(StageConfig):
    """`cskv analyze` has no settings."""


def analyze(run: Run, base: BaseModel, calibrate: Manifest, progress: Progress) -> Manifest:
    """Write `report.json` and the figures, from the statistics in the `calibrate` folder.

    The report holds, for `k` and `v` of each layer, what `Spectrum` says; `channels`, the width of a key cache;
    `advised_ratio` for `k` and `v`; and `advice`, in sentences. The manifest's report holds the last two.

    Raises:
        CskvError: the statistics of a layer are missing or damaged.
    """
    inputs = {"calibrate": calibrate.digest}
    partial = run.partial("analyze", inputs)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    spectra, tokens, hidden = _measure(run, base, progress)
    ratios = {name: affordable(caches, BOLD) for name, caches in _by_name(spectra).items()}
    advice = [*advise(spectra, ratios, run.path), *_few_tokens(tokens, hidden)]
    summary = {"advised_ratio": ratios, "advice": advice}
    write_json(partial / REPORT, describe(spectra) | summary)
    middle = list(spectra)[len(spectra) // 2]
    plot_spectrum(partial / f"spectrum-layer-{middle}.png", middle, spectra[middle])
    plot_energy(partial / "energy.png", spectra)
    plot_ranks(partial / "rank-map.png", spectra)
    return run.commit("analyze", partial, AnalyzeConfig(), inputs, summary)


def load_report(folder: Path) -> dict[str, Any]:
    """The content of `report.json` in the stage's folder."""
    return json.loads((folder / REPORT).read_text())


def rows(report: dict[str, Any]) -> list[list[str]]:
    """The report as a table under `HEADER`, a row per layer."""
    return [[str(layer["index"]), *_cells(layer["k"]), *_cells(layer["v"])] for layer in report["layers"]]


def describe(spectra: Spectra) -> dict[str, Any]:
    """The spectra as numbers for JSON."""
    layers = [{"index": i} | {name: _numbers(pair[name]) for name in "kv"} for i, pair in spectra.items()]
    return {"layers": layers, "channels": len(layers[0]["k"]["singular_values"])}


def affordable(caches: list[Spectrum], error: float) -> float:
    """The largest ratio, in steps of 0.05 up to 0.9, that keeps to this error, on average over the layers; 0: none."""
    return max((ratio for ratio in _GRID if _mean_error(caches, ratio) <= error), default=0.0)


def advise(spectra: Spectra, ratios: dict[str, float], run_path: Path) -> list[str]:
    """Say which cache compresses better, what ratios an error allows, which layers are hardest, and what to do next.

    Args:
        ratios: those that `BOLD` allows, for "k" and "v".
    """
    k, v = _by_name(spectra).values()
    if not any(ratios.values()):
        flat = (
            f"No ratio keeps the expected error to {_percent(BOLD)}: at 0.5 it is {_percent(_mean_error(k, 0.5))} for "
            f"keys and {_percent(_mean_error(v, 0.5))} for values, so low rank alone does not suit this model."
        )
        return [_comparison(k, v), flat]
    allowed = (
        f"An average error of at most {_percent(CAREFUL)} allows ratio "
        f"{affordable(k, CAREFUL):g} for keys and {affordable(v, CAREFUL):g} for values; "
        f"{_percent(BOLD)} allows {ratios['k']:g} and {ratios['v']:g}."
    )
    return [_comparison(k, v), allowed, *_hardest(spectra, ratios), _next(k, v, ratios, run_path)]


def _measure(run: Run, base: BaseModel, progress: Progress) -> tuple[Spectra, int, int]:
    """The spectra by layer, and how many tokens of what width they come from."""
    spectra = {}
    with run.offload() as offload:
        model = load_by_layer(base.folder, Path(offload), dtype=torch.float32, device="cpu")
        layers = compressible_layers(model.config)
        modules = attentions(model)
        with progress.task("analyze", len(layers), "layers") as advance:
            for i in layers:
                layer = statistics.load_layer(run.folder("calibrate"), i)
                with in_memory(modules[i], "cpu") as attention:
                    projections = kv_projections(attention)
                spectra[i] = {name: cache_spectrum(layer.gram, weight) for name, (weight, _) in projections.items()}
                advance(1)
    return spectra, layer.tokens, len(layer.gram)


def _numbers(cache: Spectrum) -> dict[str, Any]:
    return {
        "singular_values": cache.singular_values.tolist(),
        **{f"rank_{energy:.0%}".rstrip("%"): cache.rank_for(energy) for energy in ENERGIES},
        "effective_rank": cache.effective_rank,
        "relative_error": {str(ratio): cache.relative_error(ratio) for ratio in RATIOS},
    }


def _cells(numbers: dict[str, Any]) -> list[str]:
    ranks = "/".join(str(numbers[f"rank_{energy}"]) for energy in (90, 95, 99))
    errors = "/".join(f"{100 * numbers['relative_error'][ratio]:.1f}" for ratio in ("0.5", "0.8"))
    return [f"{numbers['effective_rank']:.1f}", ranks, errors]


def _comparison(k: list[Spectrum], v: list[Spectrum]) -> str:
    wins = sum(key.relative_error(0.8) < value.relative_error(0.8) for key, value in zip(k, v, strict=True))
    keys_win = 2 * wins >= len(k)
    who = "Keys compress better than values" if keys_win else "Values compress better than keys"
    return (
        f"{who} in {wins if keys_win else len(k) - wins} of {len(k)} layers: at ratio 0.8 the expected relative error, "
        f"averaged over the layers, is {_percent(_mean_error(k, 0.8))} for keys and {_percent(_mean_error(v, 0.8))} "
        "for values."
    )


def _hardest(spectra: Spectra, ratios: dict[str, float]) -> list[str]:
    """The three layers with the largest error of K and V together; nothing where there are few to choose from."""
    if len(spectra) < 6:
        return []
    errors = {i: {name: pair[name].relative_error(ratios[name]) for name in "kv"} for i, pair in spectra.items()}
    worst = sorted(errors, key=lambda i: -sum(errors[i].values()))[:3]
    named = [f"{i} ({_percent(errors[i]['k'])} of K, {_percent(errors[i]['v'])} of V)" for i in worst]
    return [f"Hardest at the latter are layers {', '.join(named)}."]


def _next(k: list[Spectrum], v: list[Spectrum], ratios: dict[str, float], run_path: Path) -> str:
    kept = sum(rank_at(ratios[name], cache.channels) for name, caches in (("k", k), ("v", v)) for cache in caches)
    share = _percent(kept / sum(cache.channels for cache in k + v))
    path = shlex.quote(str(run_path))
    return (
        f"Next: cskv compress --run {path} --ratio-k {ratios['k']:g} --ratio-v {ratios['v']:g}   "
        f"(keeps {share} of the channels; cskv eval tells what that costs)"
    )


def _few_tokens(tokens: int, hidden: int) -> list[str]:
    if tokens >= hidden:
        return []
    return [
        f"Calibrated on {tokens} tokens, fewer than the {hidden} channels of a layer's input: all this is too rosy."
    ]


def _by_name(spectra: Spectra) -> dict[str, list[Spectrum]]:
    return {name: [pair[name] for pair in spectra.values()] for name in "kv"}


def _mean_error(caches: list[Spectrum], ratio: float) -> float:
    return fmean(cache.relative_error(ratio) for cache in caches)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"
