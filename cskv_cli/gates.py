"""`cskv eval --fail-under`: conditions on what is measured, for scripts."""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

COMPRESSION = "compression"
COMPRESSION_TOKENS = 8192
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_PERPLEXITY = ("perplexity", "perplexity_ratio", "kl", "top1_agreement")
_CONDITION = re.compile(r"\s*([a-z0-9_-]+)\s*(<=|>=|<|>)\s*([-+.\w]+)\s*")


@dataclass(frozen=True)
class Gate:
    """`name comparison bound`."""

    name: str
    comparison: str
    bound: float

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.bound:g}"

    def check(self, values: dict[str, float]) -> dict[str, Any]:
        """The condition, the value measured, and whether it holds; what is not a number fails."""
        value = values[self.name]
        return {"condition": str(self), "value": value, "passed": _COMPARISONS[self.comparison](value, self.bound)}


def parse_gates(texts: Iterable[str], tasks: Sequence[str]) -> list[Gate]:
    """Gates on what these tasks measure.

    Raises:
        ValueError: not a condition, or on something that none of the tasks measures.
    """
    return [_parse(text, tasks) for text in texts]


def names_for(tasks: Iterable[str]) -> list[str]:
    """What can be asked of these tasks: a task of answers gives its score and the score's ratio to the base's."""
    names = [COMPRESSION]
    for task in tasks:
        names += _PERPLEXITY if task == "perplexity" else (task, f"{task}_ratio")
    return names


def values_of(results: Iterable[dict[str, Any]], compression: float) -> dict[str, float]:
    """What was measured, by name.

    Args:
        compression: share of the cache's bytes that is gone at 8,192 tokens.
    """
    values = {COMPRESSION: compression}
    for result in results:
        key = "perplexity" if result["task"] == "perplexity" else "score"
        base, cskv = (result[who][key] for who in ("base", "cskv"))
        values |= {result["task"]: cskv, f"{result['task']}_ratio": cskv / base if base else float("nan")}
        values |= {name: result[name] for name in ("kl", "top1_agreement") if name in result}
    return values


def _parse(text: str, tasks: Sequence[str]) -> Gate:
    match = _CONDITION.fullmatch(text)
    try:
        name, comparison, bound = match[1], match[2], float(match[3])
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not a condition: write NAME<=NUMBER, as in perplexity_ratio<=1.15") from None
    if name not in names_for(tasks):
        given = " ".join(f"--task {task}" for task in tasks)
        raise ValueError(f"{name!r} is not measured with {given}; there are: {', '.join(names_for(tasks))}")
    return Gate(name, comparison, bound)
