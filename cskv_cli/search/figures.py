"""The allocation as a map, and quality against bytes."""

from pathlib import Path
from typing import Any

from cskv_cli.plots import page
from cskv_cli.search.options import Frame, Setting

_NAMES = {"k": "Keys", "v": "Values"}


def plot_allocation(path: Path, frame: Frame, setting: Setting) -> None:
    """Layers x keys and values: colour is the rank as a share of the channels, the number the bits of a latent."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    layers = frame.layers
    with page(path, height=1.6) as figure:
        ax = figure.subplots()
        chosen = [[setting.get((i, name), frame.exact) for i in layers] for name in _NAMES]
        shares = [[100 * option.rank / frame.shape.channels for option in row] for row in chosen]
        cells = ax.pcolormesh(shares, cmap=colormaps["viridis_r"], vmin=0, vmax=100, edgecolors="white", linewidth=0.6)
        for y, row in enumerate(chosen):
            for x, option in enumerate(row):
                ink = "white" if shares[y][x] > 40 else "black"
                ax.text(x + 0.5, y + 0.5, option.bits or 16, ha="center", va="center", fontsize=5.5, color=ink)
        ax.invert_yaxis()
        ax.set_yticks([0.5, 1.5], list(_NAMES.values()))
        step = -(-len(layers) // 32)
        ax.set_xticks([x + 0.5 for x in range(0, len(layers), step)], layers[::step])
        ax.tick_params(length=0)
        ax.set(xlabel="Layer (number: bits of a latent)")
        bar = figure.colorbar(cells, ax=ax, label="Rank (% of channels)", aspect=12, pad=0.02, ticks=MaxNLocator(3))
        bar.outline.set_visible(False)


def plot_front(
    path: Path,
    front: list[dict[str, float]],
    others: list[dict[str, Any]],
    baselines: list[dict[str, Any]],
    best: dict[str, Any],
) -> None:
    """KL against the share of bytes kept: predicted as lines, measured on the held-out part as points."""
    with page(path, height=2.9) as figure:
        ax = figure.subplots()
        kept = [100 * (1 - line["compression"]) for line in front]
        ax.plot(kept, [line["search"] for line in front], color="#0072B2", label="search, predicted")
        ax.plot(kept, [line["uniform"] for line in front], color="#D55E00", linestyle="--", label="uniform, predicted")
        for kind, marker, color in (("uniform", "s", "#D55E00"), ("search", "o", "#0072B2")):
            points = [(100 * (1 - r["compression"]), r["kl"]) for r in others if r["kind"] == kind]
            if points:
                ax.plot(*zip(*points, strict=True), marker, color=color, markersize=4, label=f"{kind}, measured")
        for result in baselines:
            at = 100 * (1 - result["compression"]), result["kl"]
            ax.plot(*at, "D", color="#555555", markersize=4)
            ax.annotate(result["label"], at, xytext=(4, 4), textcoords="offset points", fontsize=7)
        at = 100 * (1 - best["compression"]), best["kl"]
        ax.plot(*at, "*", color="black", markersize=9, label="chosen")
        ax.set(yscale="log", xlabel="Cache bytes (% of the base's)", ylabel="KL per token")
        ax.legend()
