"""The base model of a run directory: resolved and checked once, then remembered and watched."""

import hashlib
import json
from pathlib import Path

from cskv_cli.checkpoint.base import BaseModel, resolve_base
from cskv_cli.checkpoint.probe import check_supported
from cskv_cli.checkpoint.weights import check_finite
from cskv_cli.config import StageConfig
from cskv_cli.errors import CskvError
from cskv_cli.progress import Progress
from cskv_cli.run import STAGES, Manifest, Run


class BaseConfig(StageConfig):
    """Which model: its Hub id or absolute path, for a Hub model the commit, and whether its code may be run."""

    source: str
    revision: str | None
    trust_code: bool = False


def open_base(
    run: Run,
    model: str | None,
    revision: str | None,
    progress: Progress,
    *,
    dry: bool = False,
    trust_code: bool = False,
) -> tuple[BaseModel, Manifest | None]:
    """The run's base model; a model given for the first time is checked and remembered.

    With `dry` it is not remembered, and no weight of it is read; there may be no manifest then.

    Raises:
        CskvError: no model is given or remembered; it cannot be compressed; it is another one than the run's, or has
            changed since.
    """
    known = run.manifest("base")
    if model is None and known is None:
        hint = "begin with: cskv compress MODEL (a Hub id, a folder or a .gguf file)"
        raise CskvError(f"{run.path} remembers no model", hint)
    source = known.config["source"] if model is None else _absolute(model)
    if known is not None and not any(run.manifest(stage) for stage in STAGES if stage != "base"):
        known = None if model is not None else known  # nothing was made from it yet
    if known is not None and source != known.config["source"]:
        raise CskvError(
            f"{run.path} belongs to {known.config['source']}, not to {source}", "give each model its own --run DIR"
        )
    if known is not None and revision is None:
        revision = known.config["revision"]
    trust_code = trust_code or (known is not None and known.config.get("trust_code", False))
    base = resolve_base(source, revision=revision, work_dir=run.path / "converted", trust_code=trust_code, dry=dry)
    if dry:
        check_supported(base.folder)
        return base, known
    if known is not None:
        check_unchanged(run, base)
        return base, known
    config = BaseConfig(source=source, revision=base.revision, trust_code=trust_code)
    return base, _remember(run, base, config, _fingerprint(run, base), progress)


def check_unchanged(run: Run, base: BaseModel) -> None:
    """Raise CskvError unless the base's weights are those that the run was begun with."""
    if run.manifest("base").inputs["weights"] != _fingerprint(run, base):
        raise CskvError(f"{base.source} has changed since {run.path} was begun", "start a new one with --run DIR")


def _remember(run: Run, base: BaseModel, config: BaseConfig, weights: str, progress: Progress) -> Manifest:
    check_supported(base.folder)
    with progress.task("check weights", base.parameter_bytes, "bytes") as advance:
        check_finite(base.shards, advance)
    report = dict(kind=base.kind, model_type=base.config["model_type"], dtype=base.dtype, bytes=base.parameter_bytes)
    partial = run.partial("base", {"weights": weights})
    partial.mkdir(parents=True, exist_ok=True)
    return run.commit("base", partial, config, {"weights": weights}, report | {"notes": list(base.notes)})


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _fingerprint(run: Run, base: BaseModel) -> str:
    return hashlib.sha256(json.dumps(base.fingerprint(run.path / ".hashes.json"), sort_keys=True).encode()).hexdigest()
