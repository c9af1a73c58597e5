"""What a search has to say: its settings as lines, the front, and the allocation."""

from pathlib import Path
from statistics import median
from typing import Any

from cskv_cli.allocation import ALLOCATION, Allocation, Choice, LayerChoice
from cskv_cli.config import SearchConfig
from cskv_cli.memory import cache_bytes
from cskv_cli.run import write_json
from cskv_cli.search.combine import allocate, uniform_settings
from cskv_cli.search.costs import ItemCosts
from cskv_cli.search.measure import Measurer, Verified, setting_key
from cskv_cli.search.options import Frame, Item, Option, Setting

FRONT = [step / 100 for step in range(50, 98, 2)]


def line(frame: Frame, kind: str, label: str, setting: Setting, verified: Verified, predicted: float) -> dict[str, Any]:
    """A verified setting: its true bytes, the KL per scored token on the held-out part, and the KL predicted."""
    size = setting_bytes(frame, setting)
    return {
        "kind": kind,
        "label": label,
        "bytes": size,
        "compression": 1 - size / frame.base_bytes,
        "kl": verified.score,
        "text_kl": verified.text,
        "recall_kl": verified.recall,
        "predicted_kl": predicted,
        "setting": setting_key(frame, setting),
    }


def baseline_line(frame: Frame, label: str, size: int, verified: Verified) -> dict[str, Any]:
    """As `line`, of a method that is no setting."""
    scores = {"kl": verified.score, "text_kl": verified.text, "recall_kl": verified.recall}
    return {"label": label, "bytes": size, "compression": 1 - size / frame.base_bytes, **scores}


def setting_bytes(frame: Frame, setting: Setting) -> int:
    """True bytes of a setting's cache, whole layers included."""
    return cache_bytes(frame.shape, frame.layout(setting), frame.tokens)


def describe(
    measurer: Measurer,
    config: SearchConfig,
    budget: int,
    results: list[dict[str, Any]],
    baselines: list[dict[str, Any]],
    best: dict[str, Any],
    costs: dict[Item, ItemCosts],
) -> dict[str, Any]:
    """`report.json`.

    `settings` verified, the `best` of them, `baselines` measured, the `front` predicted, the KL of `single` options,
    and how well rank and bits add up (`separability`, see `ItemCosts`).
    """
    frame = measurer.frame
    return {
        "context": frame.tokens,
        "base_bytes": frame.base_bytes,
        "budget_bytes": budget,
        "best": best,
        "settings": results,
        "baselines": baselines,
        "group": config.group,
        "separability": median(cost.separability for cost in costs.values()),
        "front": front(frame, costs),
        "single": [
            {"layer": item[0], "of": item[1], "rank": option.rank, "bits": option.bits or 16, "kl": kl}
            | {"measured": measurer.has_divergence(item, option)}
            for item, cost in costs.items()
            for option, kl in cost.divergences.items()
        ],
    }


def front(frame: Frame, costs: dict[Item, ItemCosts]) -> list[dict[str, float]]:
    """Predicted KL of the combination and of the best uniform setting at other budgets."""
    lines = []
    for share in FRONT:
        budget = int((1 - share) * frame.base_bytes)
        setting = allocate(frame, costs, budget)
        uniform = [sum(cost(option) for cost in costs.values()) for option in uniform_settings(frame, budget)]
        if setting is not None and uniform:
            predicted = sum(costs[item](option) for item, option in setting.items())
            lines.append({"compression": share, "search": predicted, "uniform": min(uniform)})
    return lines


def save_allocation(folder: Path, frame: Frame, setting: Setting, best: dict[str, Any], report: dict[str, Any]) -> None:
    """Write a setting as the allocation that `init` and `quantize` read."""

    def chosen(layer: int, name: str, whole: bool) -> Choice | None:
        option: Option = setting.get((layer, name), frame.exact)
        return None if whole else Choice(rank=option.rank, bits=option.bits)

    whole = frame.layout(setting).whole
    layers = tuple(
        LayerChoice(index=i, k=chosen(i, "k", i in whole), v=chosen(i, "v", i in whole)) for i in frame.layers
    )
    about = {name: best[name] for name in ("bytes", "compression", "kl", "text_kl", "recall_kl", "predicted_kl")}
    about |= {"context": frame.tokens, "base_bytes": frame.base_bytes, "budget_bytes": report["budget_bytes"]}
    allocation = Allocation(window=frame.window, sinks=frame.sinks, group=frame.group, layers=layers, search=about)
    write_json(folder / ALLOCATION, allocation.model_dump(mode="json"))
