"""`cskv analyze`."""

from cskv_cli.config import CalibrateConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, ModelArgument, RevisionOption, RunOption, Settings, verb
from cskv_cli.run import Run


@verb(calibrate=CalibrateConfig)
def analyze(
    settings: Settings,
    console: Console,
    model: ModelArgument = None,
    revision: RevisionOption = None,
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Show where the cache of MODEL is redundant: spectra per layer, plots, advice. Calibrates first if need be."""
    from cskv_cli.pipeline import Pipeline
    from cskv_cli.stages.analyze import HEADER, load_report, rows

    with Run(run).lock():
        Pipeline(Run(run), model, revision, settings, console).analyze()
    folder = run / "analyze"
    report = load_report(folder)
    console.table("Rank of the key and value caches", HEADER, rows(report))
    console.line()
    for sentence in report["advice"]:
        console.line(sentence)
    console.line(f"Plots and report.json: {folder}")
    console.result({"folder": str(folder), **report})
