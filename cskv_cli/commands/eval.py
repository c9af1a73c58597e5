"""`cskv eval`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cskv_cli.config import EvalConfig
from cskv_cli.console import Console
from cskv_cli.gates import Gate, parse_gates, values_of
from cskv_cli.options import DEFAULT_RUN, RevisionOption, Settings, verb


class Task(StrEnum):
    """What can be measured."""

    perplexity = "perplexity"
    retrieval = "retrieval"


DEFAULT_CHECKPOINT = str(Path(os.environ.get("CSKV_RUN", DEFAULT_RUN)) / "export")
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder or Hub id of an export.")]
TaskOption = Annotated[list[Task], typer.Option("--task", help="What to measure; may be given several times.")]
GATE_HELP = "Exit with 3 unless this holds: perplexity_ratio<=1.15, compression>=0.75; may be given several times."
GateOption = Annotated[list[str], typer.Option("--fail-under", metavar="CONDITION", help=GATE_HELP)]
GATE_FAILED = 3


@verb(eval=EvalConfig)
def evaluate(
    settings: Settings,
    console: Console,
    checkpoint: CheckpointArgument = DEFAULT_CHECKPOINT,
    task: TaskOption = [Task.perplexity],  # noqa: B006
    revision: RevisionOption = None,
    fail_under: GateOption = [],  # noqa: B006
) -> None:
    """Measure what the smaller cache costs, token by token as if decoded, beside the base model."""
    config = EvalConfig(**settings["eval"])
    gates = parsed_gates(fail_under, task)
    from cskv_cli.checkpoint.load import find_checkpoint
    from cskv_cli.measurements import keep
    from cskv_cli.stages.eval import evaluate as run
    from cskv_cli.stages.inspect import compression

    folder = find_checkpoint(checkpoint, revision)
    results = run(folder, dict.fromkeys(task), config, console.progress)
    try:
        keep(folder, config, results)
    except OSError as error:
        console.warn(f"the results are not kept for the model card: {error}")
    for note in [note for result in results for note in result["notes"]]:
        console.warn(note)
    size = results[0]["cache_bytes_per_token"]
    rows = [row for result in results for row in ROWS[result["task"]](result)]
    rows.append(("cache bytes per token", f"{size['base']:,}", f"{size['cskv']:,.0f}"))
    console.table(checkpoint, ("", "base", "CSKV"), rows)
    checked = [gate.check(values_of(results, compression(folder))) for gate in gates]
    content = results[0] if len(results) == 1 else {"tasks": results}
    console.result(content | ({"fail_under": checked} if checked else {}))
    report_gates(console, checked)


def parsed_gates(conditions: list[str], tasks: list[Task]) -> list[Gate]:
    """The conditions of --fail-under; one that is none, or on what is not measured, is a usage error."""
    try:
        return parse_gates(conditions, list(dict.fromkeys(tasks)))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def report_gates(console: Console, checked: list[dict[str, Any]]) -> None:
    """Say which conditions do not hold, and exit with 3 if there are any."""
    failed = [gate for gate in checked if not gate["passed"]]
    for gate in failed:
        console.fail(f"{gate['condition']} does not hold: it is {gate['value']:.4g}", "")
    if failed:
        raise typer.Exit(GATE_FAILED)


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
