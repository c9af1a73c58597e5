"""`cskv calibrate`."""

from cskv_cli.config import CalibrateConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, ModelArgument, RevisionOption, RunOption, Settings, TrustOption, verb
from cskv_cli.run import Run


@verb(calibrate=CalibrateConfig)
def calibrate(
    settings: Settings,
    console: Console,
    model: ModelArgument = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Measure what the attention layers of MODEL read: one layer in memory at a time."""
    from cskv_cli.pipeline import Pipeline

    with Run(run).lock():
        pipeline = Pipeline(Run(run), model, revision, settings, console, trust_code=trust_remote_code)
        manifest = pipeline.calibrate()
    report = manifest.report
    console.line(f"{report['tokens']:,} tokens through {len(report['layers'])} layers -> {run / 'calibrate'}")
    console.result({"folder": str(run / "calibrate"), **report})
