"""`cskv export`."""

from typing import Annotated

import typer

from cskv_cli.commands.push import Target
from cskv_cli.config import ExportConfig, PushConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, RunOption, Settings, verb
from cskv_cli.run import Run

CardOption = Annotated[bool, typer.Option("--card", help="Only show the model card.")]


@verb(export=ExportConfig, push=PushConfig)
def export(settings: Settings, console: Console, card: CardOption = False, run: RunOption = DEFAULT_RUN) -> None:
    """Write the checkpoint that transformers loads, and push it if asked to."""
    from cskv_cli.commands.report import show_checkpoint
    from cskv_cli.pipeline import Pipeline

    here, pushed = Run(run), None
    config = PushConfig(**settings["push"])
    with here.lock():
        target = None if config.push is None or card else Target(config, here, None)
        pipeline = Pipeline(here, None, None, settings, console)
        if card:
            text = pipeline.card()
            console.line(text)
            return console.result({"card": text})
        if target is not None:
            target.check(pipeline)
        manifest = pipeline.export()
        if target is not None:
            pushed = target.send(pipeline, manifest)
    return show_checkpoint(console, run / "export", manifest.report, pushed)
