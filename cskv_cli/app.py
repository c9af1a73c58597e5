"""The Typer app: verbs only, so that `--help` imports no torch."""

import json
import os
import platform
import sys
from importlib import metadata
from typing import Annotated

import typer

from cskv_cli import __version__
from cskv_cli.commands import (
    analyze,
    bench,
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
    sweep,
)
from cskv_cli.commands.push import PushCommand

app = typer.Typer(
    name="cskv",
    help="Shrink the KV cache of a Hugging Face causal language model (CSKV, arXiv 2409.10593).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("analyze")(analyze.analyze)
app.command("compress", cls=PushCommand)(compress.compress)
app.command("bench")(bench.bench)
app.command("eval")(eval.evaluate)
app.command("sweep")(sweep.sweep)
app.command("calibrate")(calibrate.calibrate)
app.command("search")(search.search)
app.command("init")(init.init)
app.command("finetune")(finetune.finetune)
app.command("quantize")(quantize.quantize)
app.command("export", cls=PushCommand)(export.export)
app.command("inspect")(inspect.inspect)
app.command("status")(status.status)
app.add_typer(recipes.app, name="recipes")


def about() -> dict[str, str | None]:
    """Versions of what a bug may depend on; None for what is not installed. Imports none of it."""
    found: dict[str, str | None] = {"cskv": __version__, "python": platform.python_version()}
    found["platform"] = platform.platform()
    for package in ("torch", "transformers", "huggingface_hub", "safetensors", "accelerate", "datasets", "gguf"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


VERSION_HELP = "Show the version; with --json, of everything a bug may depend on."


@app.callback(invoke_without_command=True)
def _callback(
    version: Annotated[bool, typer.Option("--version", help=VERSION_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    if version:
        typer.echo(json.dumps(about()) if as_json else f"cskv {__version__}")
        raise typer.Exit
    if as_json:
        raise typer.BadParameter("--json goes behind the verb: cskv VERB --json")


def main() -> None:
    """The `cskv` command."""
    _open_streams()
    app()


def _open_streams() -> None:
    """Give standard streams that are closed a place to go, lest a file of ours take their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
