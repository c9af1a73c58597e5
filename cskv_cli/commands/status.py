"""`cskv status`."""

from typing import Any

from cskv_cli.console import Console
from cskv_cli.errors import CskvError
from cskv_cli.options import DEFAULT_RUN, RunOption, verb
from cskv_cli.run import STAGES, Run


@verb()
def status(console: Console, run: RunOption = DEFAULT_RUN) -> None:
    """Show a run directory: its stages, their sizes and settings, and what is stale and why."""
    here = Run(run)
    if here.manifest("base") is None:
        raise CskvError(f"{run} is no run directory: it remembers no model", "begin one: cskv compress MODEL")
    stages = [_stage(here, stage) for stage in STAGES]
    rows = [
        (s["stage"], s["state"], f"{s['bytes'] / 1e6:,.1f} MB" if s["bytes"] else "", s["settings"]) for s in stages
    ]
    source = here.manifest("base").config["source"]
    console.table(f"{run}: {source}", ("stage", "state", "size", "settings"), rows, texts=4)
    console.result({"run": str(run), "stages": stages})


def _stage(run: Run, stage: str) -> dict[str, Any]:
    try:
        manifest = run.manifest(stage)
    except CskvError as error:
        return {"stage": stage, "state": f"damaged: {error.message}", "bytes": 0, "settings": ""}
    if manifest is None:
        begun = any(run.path.glob(f".{stage}-*"))
        return {"stage": stage, "state": "unfinished" if begun else "not made", "bytes": 0, "settings": ""}
    try:
        reason = run.stale(stage)
    except CskvError as error:
        reason = error.message
    settings = " ".join(f"{key}={_short(value)}" for key, value in manifest.config.items() if value not in (None, []))
    return {
        "stage": stage,
        "state": f"stale: {reason}" if reason else "ready",
        "bytes": sum(entry["bytes"] for entry in manifest.files.values()),
        "settings": settings,
    }


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
