"""The Typer app: verbs only, so that `--help` imports no torch."""

from typing import Annotated

import typer

from cskv_cli import __version__
from cskv_cli.commands import (
    analyze,
    calibrate,
    compress,
    eval,  # noqa: A004
    export,
    finetune,
    init,
    inspect,
    quantize,
    recipes,
    search,
    status,
)

app = typer.Typer(
    name="cskv",
    help="Shrink the KV cache of a Hugging Face causal language model (CSKV, arXiv 2409.10593).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("analyze")(analyze.analyze)
app.command("compress")(compress.compress)
app.command("eval")(eval.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("search")(search.search)
app.command("init")(init.init)
app.command("finetune")(finetune.finetune)
app.command("quantize")(quantize.quantize)
app.command("export")(export.export)
app.command("inspect")(inspect.inspect)
app.command("status")(status.status)
app.add_typer(recipes.app, name="recipes")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cskv {__version__}")
        raise typer.Exit


@app.callback()
def _callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `cskv` command."""
    app()
