"""`cskv eval`."""

from enum import StrEnum
from typing import Annotated

import typer

from cskv_cli.config import EvalConfig
from cskv_cli.console import Console
from cskv_cli.options import Settings, verb


class Task(StrEnum):
    """What can be measured."""

    perplexity = "perplexity"


CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder or Hub id of an export.")]
TaskOption = Annotated[Task, typer.Option("--task", help="What to measure.")]


@verb(eval=EvalConfig)
def evaluate(
    settings: Settings,
    console: Console,
    checkpoint: CheckpointArgument = "cskv-run/export",
    task: TaskOption = Task.perplexity,
) -> None:
    """Measure what the smaller cache costs, token by token as if decoded, beside the base model."""
    config = EvalConfig(**settings["eval"])
    from cskv_cli.checkpoint.load import find_checkpoint
    from cskv_cli.stages.eval import perplexity

    result = perplexity(find_checkpoint(checkpoint), config, console.progress)
    for note in result["notes"]:
        console.warn(note)
    base, cskv, size = result["base"], result["cskv"], result["cache_bytes_per_token"]
    console.table(
        f"{checkpoint}, {result['tokens']:,} tokens",
        ("", "base", "CSKV"),
        [
            ("perplexity", f"{base['perplexity']:.2f}", f"{cskv['perplexity']:.2f}"),
            ("KL per token", "0", f"{result['kl']:.4f}"),
            ("same first choice", "100 %", f"{result['top1_agreement']:.1%}"),
            ("cache bytes per token", f"{size['base']:,}", f"{size['cskv']:,.0f}"),
        ],
    )
    console.result(result)
