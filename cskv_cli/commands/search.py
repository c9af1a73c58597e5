"""`cskv search`."""

from typing import Annotated, Any

import typer

from cskv_cli.config import SearchConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, RunOption, Settings, verb
from cskv_cli.run import Run

DryOption = Annotated[bool, typer.Option("--dry-run", help="Only tell what would be measured, and how long it takes.")]


@verb(search=SearchConfig)
def search(settings: Settings, console: Console, dry_run: DryOption = False, run: RunOption = DEFAULT_RUN) -> None:
    """Choose rank and bits of keys and values in each layer, so that the cache keeps to a budget of bytes."""
    from cskv_cli.pipeline import Pipeline

    here = Run(run)
    if not settings["search"] and here.manifest("search") is None:
        raise typer.BadParameter("give a budget: --budget 0.9, --bytes-per-token N, or --memory 8GB --context 128k")
    with here.lock():
        pipeline = Pipeline(here, None, None, settings, console)
        here.require("calibrate")
        if dry_run:
            return _show_plan(pipeline.plan_search(), console)
        manifest = pipeline.search()
    show_search(console, manifest.report)
    folder = run / "search"
    console.line(f"Allocation: {folder / 'allocation.json'}; figures: allocation.png, front.png")
    console.line(f"Next: cskv init --allocation auto --run {run} && cskv quantize --allocation auto --run {run}")
    return console.result({"folder": str(folder), **manifest.report})


def show_search(console: Console, report: dict[str, Any]) -> None:
    """Uniform settings and combinations of the same bytes, the chosen one marked."""
    best = report["best"]
    console.table(
        f"KL per token on the held-out part; the cache at {report['context']:,} tokens, the base's "
        f"{report['base_bytes'] / 1e6:,.1f} MB",
        ("", "", "MB", "removed", "KL", "of text", "of lists and quotes", "predicted"),
        [
            (
                f"{line['kind']}: {line['label']}",
                "chosen" if line["setting"] == best["setting"] else "",
                f"{line['bytes'] / 1e6:,.2f}",
                f"{line['compression']:.2%}",
                *(f"{line[name]:.4f}" for name in ("kl", "text_kl", "recall_kl", "predicted_kl")),
            )
            for line in report["settings"]
        ],
        texts=2,
    )
    for line in report["baselines"]:
        size = f"{line['bytes'] / 1e6:,.2f} MB, {line['compression']:.2%} removed"
        console.line(f"{line['label']}: KL {line['kl']:.4f} at {size}")
    console.line(f"{report['measurements_made']} measurements in {report['seconds']:,.0f} s")


def _show_plan(plan: dict[str, Any], console: Console) -> None:
    console.table(
        "Search",
        ("", ""),
        [
            ("budget", f"{plan['budget_bytes']:,} of {plan['base_bytes']:,} bytes at {plan['context']:,} tokens"),
            ("candidates to measure", f"{plan['candidates']} ({plan['already_measured']} are)"),
            ("combinations to verify", f"at most {plan['settings_to_verify']}"),
            (
                "time",
                f"about {plan['estimated_seconds'] / 60:,.1f} min ({plan['seconds_per_forward']:.2f} s a forward)",
            ),
        ],
        texts=2,
    )
    console.result(plan)
