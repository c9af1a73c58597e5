"""The results of a sweep as a table and as plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cskv_cli.plots import plot_tradeoff

Row = dict[str, Any]
BUDGET_AXES = ("ratio", "ratio_k", "ratio_v", "rank_k", "rank_v", "bits")
_NAMES = {"perplexity": "perplexity", "retrieval": "retrieval, found"}


def write_report(folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Write `table.md` and a plot of each task, `<task>.png`."""
    header, cells = table(rows)
    lines = [header, ["---"] * len(header), *cells]
    (folder / "table.md").write_text("".join(f"| {' | '.join(map(str, line))} |\n" for line in lines))
    plots = []
    for task in rows[0]["tasks"]:
        plots.append(str(folder / f"{task}.png"))
        plot_tradeoff(Path(plots[-1]), _NAMES.get(task, task), curves(rows, task), task != "perplexity")
    return {"plots": plots, "texts": 1 + len(_varying(rows))}


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what tells them apart, the score of each task, and bytes.

    *Bytes per token* are what a token adds to a long cache, *held* what the caches of the first task held at its end,
    over the tokens in them; both as shares of the full cache.
    """
    axes, tasks = _varying(rows), list(rows[0]["tasks"])
    named = ["init" if axis == "method" else axis for axis in axes]
    header = ["method", *named, *(_NAMES.get(task, task) for task in tasks), "bytes per token", "share", "held"]
    return header, [
        [_method(row), *(_text(row["axes"].get(axis, "")) for axis in axes), *_numbers(row)] for row in rows
    ]


def curves(rows: Sequence[Row], task: str) -> dict[str, list[tuple[float, float]]]:
    """(bytes held per token, score) of a task, by method and whatever else than a budget tells its rows apart."""
    axes = [axis for axis in _varying(rows) if axis not in BUDGET_AXES or axis == "bits"]
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        apart = [
            f"{axis} {_text(row['axes'][axis])}" for axis in axes if row["method"] == "cskv" and axis in row["axes"]
        ]
        name, result = ", ".join([_method(row), *apart]), row["tasks"][task]
        found.setdefault(name, []).append((result["held_bytes_per_token"][row["method"]], result["score"]))
    return {name: sorted(points) for name, points in found.items()}


def _varying(rows: Sequence[Row]) -> list[str]:
    """The axes in which rows differ, in the order of the recipe."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for axis, value in row["axes"].items():
            values.setdefault(axis, []).append(value)
    return [axis for axis, given in values.items() if len(given) < len(rows) or any(v != given[0] for v in given)]


def _numbers(row: Row) -> list[str]:
    first, name = next(iter(row["tasks"].values())), row["method"]
    size, held = first["cache_bytes_per_token"], first["held_bytes_per_token"]
    scores = [
        f"{result['score']:.2f}" if task == "perplexity" else f"{result['score']:.1%}"
        for task, result in row["tasks"].items()
    ]
    return [*scores, f"{size[name]:,.0f}", f"{size[name] / size['base']:.1%}", f"{held[name] / held['base']:.1%}"]


def _method(row: Row) -> str:
    return "CSKV" if row["method"] == "cskv" else row["method"]


def _text(value: Any) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)
