"""`cskv recipes ls|show|cp`."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from cskv_cli import recipes
from cskv_cli.console import Console
from cskv_cli.errors import CskvError
from cskv_cli.options import verb

app = typer.Typer(help="Settings of whole compressions, ready to use with compress --recipe.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(help="Name of a recipe, as ls shows it.")]
TargetArgument = Annotated[Path, typer.Argument(help="File or folder to copy it to.")]


@app.command("ls")
@verb()
def ls(console: Console) -> None:
    """List the recipes."""
    found = {name: _title(recipes.find(name)) for name in recipes.names()}
    for name, title in found.items():
        console.line(f"{name:28} {title}")
    console.result({"recipes": found})


@app.command("show")
@verb()
def show(console: Console, name: NameArgument) -> None:
    """Print a recipe."""
    text = recipes.find(name).read_text()
    console.line(text.rstrip())
    console.result({"name": name, "text": text})


@app.command("cp")
@verb()
def cp(console: Console, name: NameArgument, target: TargetArgument = Path()) -> None:
    """Copy a recipe, to change it."""
    source = recipes.find(name)
    path = target / source.name if target.is_dir() else target
    if path.exists():
        raise CskvError(f"{path} exists", "name another file, or delete it")
    shutil.copyfile(source, path)
    console.line(str(path))
    console.result({"file": str(path)})


def _title(path: Path) -> str:
    return path.read_text().splitlines()[0].lstrip("# ")
