"""The loss curve: `curve.jsonl` for machines, `curve.png` for people (Figure 4 of arXiv 2409.10593)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cskv_cli.plots import page
from cskv_cli.training.loop import Outcome

JSONL, PNG = "curve.jsonl", "curve.png"
_COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
_LABELS = {"distill": "KL to the full cache (nats per token)", "reconstruction": "Squared error of keys and values"}


def write_curve(folder: Path, objective: str, outcome: Outcome) -> None:
    """Every step and every scoring, in their order, a JSON object a line; and the figure."""
    lines = [{"loss": line["loss"], "step": line["step"], "rate": line["rate"]} for line in outcome.steps]
    lines += [
        {"held_out": {k: v for k, v in line.items() if k != "step"}, "step": line["step"]} for line in outcome.scores
    ]
    lines.sort(key=lambda line: line["step"])
    (folder / JSONL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot_curves(folder / PNG, {"held out": lines}, objective)


def plot_curves(path: Path, curves: Mapping[str, list[dict[str, Any]]], objective: str) -> None:
    """Held-out scores over the steps, a line each; with one curve alone the loss of every step is behind it."""
    with page(path, height=2.7) as figure:
        ax = figure.subplots()
        for color, (label, lines) in zip(_COLORS, curves.items(), strict=False):
            held_out = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
            steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
            if len(curves) == 1:
                ax.plot(*zip(*steps, strict=True), color="0.75", linewidth=0.6, label="training window")
                for part, dash in (("text", (0, (4, 2))), ("recall", (0, (1, 1)))):
                    if held_out and part in held_out[0][1] and "recall" in held_out[0][1]:
                        values = [(step, score[part]) for step, score in held_out]
                        ax.plot(*zip(*values, strict=True), color=color, linestyle=dash, linewidth=0.8, label=part)
            values = [(step, score["score"]) for step, score in held_out]
            ax.plot(*zip(*values, strict=True), "o-", color=color, markersize=3, linewidth=1.2, label=label)
        ax.set(xlabel="Step", ylabel=_LABELS[objective], yscale="log")
        ax.legend()
