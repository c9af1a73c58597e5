"""Figures about spectra, to be put in a paper: legible in grayscale and to the colour-blind, the same bytes each time.

All of them are PNGs of 200 dpi, 6.5 inches wide (the text width of most venues).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cskv_cli.spectrum import ENERGIES, Spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

Spectra = Mapping[int, Mapping[str, Spectrum]]
"""Layer index -> "k" and "v" -> the spectrum of that cache."""

_NAMES = {"k": "Keys", "v": "Values"}
_MARKERS = dict(zip(ENERGIES, "os^", strict=True))
_COLORS = {"k": "#0072B2", "v": "#D55E00"}  # from the palette of Okabe and Ito
_ENERGY_TICKS = {1.0: "0", 0.5: "50", 0.1: "90", 0.05: "95", 0.01: "99", 1e-3: "99.9", 1e-4: "99.99"}
_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
_DPI = 200
_MOST_NUMBERED_LAYERS = 40


def plot_spectrum(path: Path, layer: int, pair: Mapping[str, Spectrum]) -> None:
    """The singular values of one layer's K and V caches, relative to the largest (Figure 3 of arXiv 2409.10593)."""
    with page(path, height=2.5) as figure:
        axes = dict(zip(_NAMES, figure.subplots(1, 2, sharey=True), strict=True))
        for name, ax in axes.items():
            _draw_spectrum(ax, pair[name], _COLORS[name])
            ax.set_title(f"{_NAMES[name]}, layer {layer} (effective rank {pair[name].effective_rank:.1f})", loc="left")
        lowest = min(_relative(spectrum).min() for spectrum in pair.values())
        axes["k"].set_ylim(max(float(lowest) / 2, 1e-5), 1.5)
        axes["k"].set_ylabel("Singular value (largest = 1)")


def plot_energy(path: Path, spectra: Spectra) -> None:
    """The share of the energy that each rank keeps, a curve per layer, on a scale that spreads what is near 100 %."""
    from matplotlib.ticker import MaxNLocator

    with page(path, height=2.7) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        colors = _depth_colors(list(spectra))
        for (name, title), ax in zip(_NAMES.items(), axes, strict=True):
            for layer, pair in spectra.items():
                _draw_energy(ax, pair[name], colors.to_rgba(layer))
            ax.set(xlabel="Rank (% of the channels)", xlim=(0, 100))
            ax.set_title(title, loc="left")
            for energy in ENERGIES:
                ax.axhline(1 - energy, color="0.45", linewidth=0.6, linestyle=(0, (1, 2)))
        _energy_axis(axes[0])
        bar = figure.colorbar(colors, ax=axes, label="Layer", aspect=30, pad=0.02, ticks=MaxNLocator(integer=True))
        bar.outline.set_visible(False)


def plot_ranks(path: Path, spectra: Spectra) -> None:
    """A map of the rank that keeps 90, 95 and 99 % of the energy in each layer, as a share of the channels."""
    with page(path, height=2.5) as figure:
        axes = figure.subplots(2, 1, sharex=True)
        for (name, title), ax in zip(_NAMES.items(), axes, strict=True):
            shares = [[pair[name].rank_for(e) / pair[name].channels for pair in spectra.values()] for e in ENERGIES]
            cells = _draw_map(ax, shares, numbered=len(spectra) <= _MOST_NUMBERED_LAYERS)
            ax.set_yticks([0.5, 1.5, 2.5], [_percent(energy) for energy in ENERGIES])
            ax.set_title(title, loc="left")
        step = -(-len(spectra) // 32)
        axes[1].set_xticks([i + 0.5 for i in range(0, len(spectra), step)], list(spectra)[::step])
        axes[1].set_xlabel("Layer")
        figure.supylabel("Energy kept", fontsize=8)
        bar = figure.colorbar(cells, ax=axes, label="Rank needed (% of the channels)", aspect=25, pad=0.02)
        bar.outline.set_visible(False)


@contextmanager
def page(path: Path, height: float) -> Iterator["Figure"]:
    """An empty figure that is written to `path` once it is drawn; no matplotlib state outlives it."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(6.5, height), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _relative(spectrum: Spectrum) -> torch.Tensor:
    return spectrum.singular_values / spectrum.singular_values[0].clamp(min=1e-300)


def plot_decoding(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Milliseconds of a decode step over the context, a curve per cache and a panel per batch, with their ranges."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    with page(path, height=2.7) as figure:
        panels = figure.subplots(1, len(batches), squeeze=False)[0]
        for batch, ax in zip(batches, panels, strict=True):
            for name, marker in zip(dict.fromkeys(row["cache"] for row in rows), "os^Dv", strict=False):
                times = [
                    (row["context"], row["decode_seconds"])
                    for row in rows
                    if row["batch"] == batch and row["cache"] == name
                ]
                ends = [[1000 * abs(t["median"] - t[end]) for _, t in times] for end in ("least", "greatest")]
                medians = [1000 * t["median"] for _, t in times]
                ax.errorbar(
                    [n for n, _ in times], medians, yerr=ends, marker=marker, markersize=3, linewidth=0.9, label=name
                )
            ax.set(xlabel="Context (tokens)", ylim=(0, None))
            ax.set_title(f"Batch {batch}", loc="left")
        panels[0].set_ylabel("Decode step (ms)")
        panels[0].legend(title="Cache")


def _draw_spectrum(ax: "Axes", spectrum: Spectrum, color: str) -> None:
    values = _relative(spectrum).clamp(min=1e-12).tolist()
    ranks = range(1, spectrum.channels + 1)
    ax.fill_between(ranks, values, 1e-12, color=color, alpha=0.2, linewidth=0)
    ax.plot(ranks, values, color=color, linewidth=1)
    for energy, marker in _MARKERS.items():
        rank = spectrum.rank_for(energy)
        label = f"{_percent(energy)}: rank {rank}"
        ax.vlines(rank, 1e-12, values[rank - 1], color="0.25", linewidth=0.6, linestyle=(0, (3, 2)))
        ax.plot(rank, values[rank - 1], marker, color=color, markersize=4.5, markeredgecolor="black", label=label)
    ax.legend(title="Energy kept", loc="upper right", alignment="left")
    ax.set(yscale="log", xlabel="Index of the singular value", xlim=(0, spectrum.channels + 1))


def _draw_energy(ax: "Axes", spectrum: Spectrum, color: tuple[float, ...]) -> None:
    missing = [1.0, *(1 - spectrum.energy).clamp(min=1e-12).tolist()]
    ranks = [100 * i / spectrum.channels for i in range(len(missing))]
    ax.plot(ranks, missing, color=color, linewidth=0.8)


def _energy_axis(ax: "Axes") -> None:
    ax.set(yscale="log", ylim=(1, 1e-4), ylabel="Energy kept (%)")
    ax.set_yticks(list(_ENERGY_TICKS), list(_ENERGY_TICKS.values()))
    ax.minorticks_off()


def _draw_map(ax: "Axes", shares: list[list[float]], numbered: bool) -> "QuadMesh":
    from matplotlib import colormaps

    percents = [[100 * share for share in row] for row in shares]
    cells = ax.pcolormesh(percents, cmap=colormaps["viridis_r"], vmin=0, vmax=100, edgecolors="white")
    cells.set_linewidth(0.6)
    ax.invert_yaxis()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    for y, row in enumerate(percents if numbered else []):
        for x, percent in enumerate(row):
            ink = "white" if percent > 40 else "black"
            ax.text(x + 0.5, y + 0.5, f"{percent:.0f}", ha="center", va="center", fontsize=5.5, color=ink)
    return cells


def _depth_colors(layers: list[int]) -> "ScalarMappable":
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    visible = ListedColormap(colormaps["viridis"](torch.linspace(0, 0.92, 256).numpy()))  # its yellow end is too pale
    return ScalarMappable(Normalize(min(layers) - 0.5, max(layers) + 0.5), visible)


def plot_tradeoff(
    path: Path, title: str, curves: Mapping[str, list[tuple[float, float]]], more_is_better: bool
) -> None:
    """Quality against the bytes that a cache holds per token, a line for each method."""
    from matplotlib import colormaps

    with page(path, height=3.2) as figure:
        ax = figure.subplots()
        colors = colormaps["viridis"].resampled(max(len(curves), 2))
        for index, (name, points) in enumerate(curves.items()):
            marker = "os^Dv<>ph*X+"[index % 12]
            ax.plot(
                *zip(*points, strict=True), marker=marker, color=colors(index), label=name, markersize=4, linewidth=1
            )
        ax.set(xscale="log", xlabel="Bytes held per token", ylabel=title.capitalize())
        if not more_is_better:
            ax.set_yscale("log")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
