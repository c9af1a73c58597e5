"""`cskv eval`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cskv_cli.config import EvalConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, Settings, verb


class Task(StrEnum):
    """What can be measured."""

    perplexity = "perplexity"
    retrieval = "retrieval"


DEFAULT_CHECKPOINT = str(Path(os.environ.get("CSKV_RUN", DEFAULT_RUN)) / "export")
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder or Hub id of an export.")]
TaskOption = Annotated[list[Task], typer.Option("--task", help="What to measure; may be given several times.")]


@verb(eval=EvalConfig)
def evaluate(
    settings: Settings,
    console: Console,
    checkpoint: CheckpointArgument = DEFAULT_CHECKPOINT,
    task: TaskOption = [Task.perplexity],  # noqa: B006
) -> None:
    """Measure what the smaller cache costs, token by token as if decoded, beside the base model."""
    config = EvalConfig(**settings["eval"])
    from cskv_cli.checkpoint.load import find_checkpoint
    from cskv_cli.stages.eval import evaluate as run

    results = run(find_checkpoint(checkpoint), dict.fromkeys(task), config, console.progress)
    for note in [note for result in results for note in result["notes"]]:
        console.warn(note)
    size = results[0]["cache_bytes_per_token"]
    rows = [row for result in results for row in ROWS[result["task"]](result)]
    rows.append(("cache bytes per token", f"{size['base']:,}", f"{size['cskv']:,.0f}"))
    console.table(checkpoint, ("", "base", "CSKV"), rows)
    console.result(results[0] if len(results) == 1 else {"tasks": results})


def _perplexity_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    base, cskv = (f"{result[name]['perplexity']:.2f}" for name in ("base", "cskv"))
    return [
        (f"perplexity of {result['tokens']:,} tokens", base, cskv),
        ("KL per token", "0", f"{result['kl']:.4f}"),
        ("same first choice", "100 %", f"{result['top1_agreement']:.1%}"),
    ]


def _retrieval_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    base, cskv = (f"{result[name]['score']:.0%}" for name in ("base", "cskv"))
    return [(f"found in {result['cases']} lists of {result['entries']} entries", base, cskv)]


ROWS = {Task.perplexity: _perplexity_rows, Task.retrieval: _retrieval_rows}
