"""Recipes of sweeps: every combination of the values listed in one YAML file, and the file its results are kept in."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

import yaml

from cskv_cli.config import CalibrateConfig, FinetuneConfig, InitConfig, QuantizeConfig, StageConfig
from cskv_cli.errors import CskvError
from cskv_cli.eval_config import EvalConfig
from cskv_cli.pipeline import checked

UNQUANTIZED = 16
UNTRAINED = "none"
BUDGETS = {
    "streaming-llm": "ratio",
    "h2o": "ratio",
    "asvd": "ratio",
    "svd-cache": "ratio",
    "kivi": "bits",
    "full": None,
}
SECTIONS = ("model", "revision", "calibrate", "init", "finetune", "quantize", "baselines", "eval")


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        method: "cskv", or a baseline.
        stages: settings of the stages that make a checkpoint, every one of them said; `finetune` is absent where
            factors are not trained, `quantize` where latents stay in the model's precision. Empty for a baseline.
        budget: of a baseline, {"ratio": 0.8} or {"bits": 4}.
        axes: what tells it from other rows, for people.
    """

    method: str
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A recipe as read; what does not change most often comes first in `cells`, so that it is made once.

    Attributes:
        tasks: as `cskv eval --task` takes them.
    """

    model: str | None
    revision: str | None
    calibrate: CalibrateConfig
    cells: tuple[Cell, ...]
    tasks: tuple[str, ...]
    eval: EvalConfig

    def digest(self, cell: Cell, task: str, artifact: str) -> str:
        """Identity of a result: the same settings on the same artifact (a digest) give the same."""
        scored = self.eval.model_dump(mode="json", exclude={"ratio", "bits"})
        parts = [cell.method, cell.stages, cell.budget, task, scored, artifact]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_sweep(path: Path, changes: Sequence[str] = ()) -> Sweep:
    """Read a recipe; every key and value is checked, in every combination.

    Args:
        changes: `SECTION.KEY=VALUE`, in place of what the recipe says; the value is YAML.

    Raises:
        CskvError: not YAML, or a key or value that means nothing.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CskvError(f"{path} is not YAML: {' '.join(str(error).split())}", "") from error
    if not isinstance(content, dict) or "eval" not in content:
        raise CskvError(
            f"{path} is no recipe of a sweep: it has no eval section", "see: cskv recipes show smollm2-paper-table1"
        )
    for change in changes:
        _change(content, change)
    if unknown := [key for key in content if key not in SECTIONS]:
        raise CskvError(f"{path}: there is no section {unknown[0]!r}", f"sections are: {', '.join(SECTIONS)}")
    scored = dict(content["eval"] or {})
    tasks = scored.pop("tasks", "perplexity")
    return Sweep(
        content.get("model"),
        content.get("revision"),
        checked(CalibrateConfig, content.get("calibrate") or {}, f"{path}: calibrate"),
        (*_baselines(content.get("baselines") or [], path), *_checkpoints(content, path)),
        (tasks,) if isinstance(tasks, str) else tuple(tasks),
        checked(EvalConfig, scored, f"{path}: eval"),
    )


def combinations(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the listed values: {a: [1, 2], b: 3} gives {a: 1, b: 3} and {a: 2, b: 3}."""
    values = [value if isinstance(value, list) else [value] for value in section.values()]
    return [dict(zip(section, combination, strict=True)) for combination in product(*values)]


def _change(content: dict[str, Any], change: str) -> None:
    name, equals, value = change.partition("=")
    *sections, key = name.split(".")
    if not equals or len(sections) > 1:
        raise CskvError(f"--set {change} is not SECTION.KEY=VALUE", "as in: --set eval.cases=8")
    targets = [content]
    for section in sections:
        parts = content.get(section)
        targets = parts if isinstance(parts, list) else [content.setdefault(section, parts) or {}]
        content[section] = targets if isinstance(parts, list) else targets[0]
    for target in targets:
        target[key] = yaml.safe_load(value)


def _baselines(entries: Sequence[Mapping[str, Any]], path: Path) -> list[Cell]:
    cells = []
    for entry in _every(list(entries)):
        method = entry.pop("method", None)
        if method not in BUDGETS:
            raise CskvError(f"{path}: baselines: {method!r} is none of {', '.join(BUDGETS)}", "name it behind method:")
        if set(entry) != {BUDGETS[method]} - {None}:
            wanted = BUDGETS[method] or "nothing"
            raise CskvError(f"{path}: baselines: {method} takes {wanted}, not {', '.join(entry) or 'nothing'}", "")
        checked(EvalConfig, entry, f"{path}: baselines: {method}")
        cells.append(Cell(method, budget=entry, axes=dict(entry)))
    return cells


def _checkpoints(content: Mapping[str, Any], path: Path) -> list[Cell]:
    """CSKV's cells; none without an init section."""
    if "init" not in content:
        return []
    cells = []
    sections = _every(content["init"]), _every(content.get("finetune")), _every(content.get("quantize"))
    for init, finetune, quantize in product(*sections):
        init, quantize, axes = dict(init), dict(quantize), init | finetune | quantize
        if "ratio" in init:
            ratio = init.pop("ratio")
            k, v = ratio if isinstance(ratio, list) else (ratio, ratio)
            init |= {"ratio_k": k, "ratio_v": v}
        stages = {"init": _whole(InitConfig, init, f"{path}: init")}
        if finetune and finetune.get("objective") != UNTRAINED:
            stages["finetune"] = _whole(FinetuneConfig, finetune, f"{path}: finetune")
        bits = quantize.pop("bits", None)
        if bits not in (None, UNQUANTIZED):
            quantize |= {"bits_k": bits, "bits_v": bits}
        if quantize and bits != UNQUANTIZED:
            stages["quantize"] = _whole(QuantizeConfig, quantize, f"{path}: quantize")
        cells.append(Cell("cskv", stages=stages, axes=axes))
    return cells


def _every(section: Any) -> list[dict[str, Any]]:
    """The combinations of a section, or of each of several."""
    parts = section if isinstance(section, list) else [section or {}]
    return list(chain.from_iterable(map(combinations, parts)))


def _whole(kind: type[StageConfig], given: dict[str, Any], where: str) -> dict[str, Any]:
    return checked(kind, given, where).model_dump(mode="json")


class Results:
    """`results.jsonl`: a line for each cell and task, written when it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_digest: dict[str, dict[str, Any]] = {}
        if not path.exists():
            return
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                if number < len(lines):
                    raise CskvError(f"{path} line {number} is damaged", "delete that line and run again") from error
                path.write_text("".join(f"{whole}\n" for whole in lines[:-1]))  # killed while it was written
            else:
                self.by_digest[entry["cell"]] = entry

    def add(self, digest: str, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a result."""
        entry = {"cell": digest, "axes": cell.axes, **result}
        with self.path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.by_digest[digest] = entry
