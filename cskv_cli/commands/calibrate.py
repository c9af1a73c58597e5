"""`cskv calibrate`."""

from cskv_cli.config import CalibrateConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, ModelArgument, RevisionOption, RunOption, Settings, verb
from cskv_cli.run import Run


@verb(calibrate=CalibrateConfig)
def calibrate(
    settings: Settings,
    console: Console,
    model: ModelArgument = None,
    revision: RevisionOption = None,
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Measure what the attention layers of MODEL read: one layer in memory at a time."""
    from cskv_cli.pipeline import Pipeline

    with Run(run).lock():
        manifest = Pipeline(Run(run), model, revision, settings, console).calibrate()
    report = manifest.report
    console.line(f"{report['tokens']:,} tokens through {len(report['layers'])} layers -> {run / 'calibrate'}")
    console.result({"folder": str(run / "calibrate"), **report})
