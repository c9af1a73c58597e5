"""What `cskv eval` found of a run's checkpoint: kept beside it, for its model card."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cskv_cli.eval_config import EvalConfig
from cskv_cli.run import MANIFEST, Manifest, Run, write_json

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

FOLDER = "eval"
CARD = "README.md"


@dataclass(frozen=True)
class Measurement:
    """One task's result.

    Attributes:
        checkpoint: identity of the files that were measured.
        data: the text, files by name alone.
        result: what the task printed.
    """

    checkpoint: str
    task: str
    data: tuple[str, ...]
    result: dict[str, Any]


def keep(checkpoint: Path, config: EvalConfig, results: Sequence[dict[str, Any]]) -> None:
    """Remember the results if the checkpoint is the export of a run; those of an earlier export are forgotten."""
    run = Run(checkpoint.resolve().parent)
    if checkpoint.resolve() != run.folder("export") or (manifest := run.manifest("export")) is None:
        return
    folder, identity = run.path / FOLDER, identity_of(manifest)
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        if (old := _read(path)) is None or old.checkpoint != identity:
            path.unlink()
    for result in results:
        measured = Measurement(identity, result["task"], tuple(map(_shown, config.data)), _plain(result))
        settings = json.dumps([measured.data, config.model_dump(mode="json"), result.get("method")], sort_keys=True)
        name = f"{result['task']}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}.json"
        write_json(folder / name, asdict(measured))


def measured(run: Run) -> list[Measurement]:
    """What was measured of the run's export as it is now."""
    manifest = run.manifest("export")
    found = [_read(path) for path in sorted((run.path / FOLDER).glob("*.json"))]
    return [m for m in found if m is not None and manifest is not None and m.checkpoint == identity_of(manifest)]


def identity_of(manifest: Manifest) -> str:
    """Identity of an export's files, its card left out: that one shows the results."""
    files = {name: entry["sha256"] for name, entry in manifest.files.items() if name not in (CARD, MANIFEST)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def quality_rows(measurement: Measurement) -> list[tuple[str, str, str]]:
    """Rows of the card: what was measured, the base's value, ours."""
    result = measurement.result
    base, cskv = result.get("base") or {}, result.get("cskv") or {}
    if measurement.task == "perplexity":
        text = f"{result['tokens']:,} tokens of {_text(measurement)}"
        return [
            (f"perplexity, {text}", f"{base['perplexity']:.2f}", f"{cskv['perplexity']:.2f}"),
            (f"KL per token, {text}", "0", f"{result['kl']:.4f}"),
            (f"same first choice, {text}", "100 %", f"{result['top1_agreement']:.1%}"),
        ]
    if "score" not in cskv:
        return []
    size = f"{result['cases']:,} cases" + (f" of {result['entries']} entries" if "entries" in result else "")
    return [(f"{measurement.task}, {size}", f"{base['score']:.3g}" if "score" in base else "", f"{cskv['score']:.3g}")]


def eval_results(measurements: Sequence[Measurement]) -> list["EvalResult"]:
    """The same for the card's metadata; only what is a finite number."""
    from huggingface_hub import EvalResult

    found = []
    for measurement in measurements:
        metric = "perplexity" if measurement.task == "perplexity" else "score"
        value = (measurement.result.get("cskv") or {}).get(metric)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        text = measurement.task == "perplexity"
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type="text" if text else f"cskv-{measurement.task}",
                dataset_name=_text(measurement) if text else f"cskv eval --task {measurement.task}",
                metric_type=metric,
                metric_name="perplexity, decoded" if text else "share answered",
                metric_value=round(value, 4),
            )
        )
    return found


def _text(measurement: Measurement) -> str:
    return ", ".join(measurement.data) or "builtin"


def _shown(source: str) -> str:
    """A `--data` argument without the folders of this machine."""
    from cskv_cli.data.sources import parse_source

    found = parse_source(source)
    return Path(found.name).resolve().name if found.kind in ("file", "folder") else found.label


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(result))


def _read(path: Path) -> Measurement | None:
    try:
        content = json.loads(path.read_text())
        return Measurement(**content | {"data": tuple(content["data"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # half written, or by another version: as if never measured
