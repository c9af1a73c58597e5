"""`cskv finetune`."""

from typing import Any

from cskv_cli.config import FinetuneConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, RunOption, Settings, verb
from cskv_cli.run import Run


@verb(finetune=FinetuneConfig)
def finetune(settings: Settings, console: Console, run: RunOption = DEFAULT_RUN) -> None:
    """Train the factors: on what the model says with its full cache, or on its keys and values."""
    from cskv_cli.pipeline import Pipeline

    here = Run(run)
    with here.lock():
        pipeline = Pipeline(here, None, None, settings, console)
        here.require("calibrate")
        manifest = pipeline.finetune(here.require("init"))
    show_training(console, manifest.report)
    console.line(f"Loss curve: {run / 'finetune' / 'curve.png'}")
    console.result({"folder": str(run / "finetune"), **manifest.report})


def show_training(console: Console, report: dict[str, Any]) -> None:
    """What training gained on the held-out part."""
    before, after = report["held_out"]["before"], report["held_out"]["after"]
    names = {
        "distill": {"text": "KL per token of text", "recall": "KL per token of looked-up values and quotes"},
        "reconstruction": {"text": "squared error, text", "recall": "squared error, lists and quotes"},
    }[report["objective"]] | {"answers": "values and quotes found"}
    rows = [
        (label, _cell(name, before[name]), _cell(name, after[name])) for name, label in names.items() if name in before
    ]
    title = f"Held out, before training and after {report['best_step']} of {report['steps']} steps"
    console.table(title, ("", "before", "after"), rows)
    console.line(f"{report['tokens_per_second']:,.0f} tokens/s, {report['peak_bytes'] / 1e9:.2f} GB at the peak")
    for note in report["notes"]:
        console.warn(note)


def _cell(name: str, value: float) -> str:
    return f"{value:.0%}" if name == "answers" else f"{value:.4g}"
