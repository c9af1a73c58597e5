"""`cskv export`."""

from cskv_cli.config import ExportConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, RunOption, Settings, verb
from cskv_cli.run import Run


@verb(export=ExportConfig)
def export(settings: Settings, console: Console, run: RunOption = DEFAULT_RUN) -> None:
    """Write the checkpoint that transformers loads."""
    from cskv_cli.commands.report import show_checkpoint
    from cskv_cli.pipeline import Pipeline

    here = Run(run)
    with here.lock():
        manifest = Pipeline(here, None, None, settings, console).export()
    show_checkpoint(console, run / "export", manifest.report)
