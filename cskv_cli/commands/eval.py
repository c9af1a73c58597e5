"""`cskv eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cskv_cli.console import Console
from cskv_cli.errors import CskvError
from cskv_cli.eval_config import EvalConfig
from cskv_cli.gates import Gate, parse_gates, values_of
from cskv_cli.options import DEFAULT_CHECKPOINT, DEFAULT_RUN, RevisionOption, RunOption, Settings, verb

if TYPE_CHECKING:
    from cskv_cli.evaluation.subjects import Subject

TASKS = ("perplexity", "retrieval", "longeval", "longbench", "lveval", "mmlu")
BENCHMARKS = TASKS[2:]
METHODS = ("cskv", "full", "streaming-llm", "h2o", "kivi", "asvd", "svd-cache")
GATE_HELP = "Exit with 3 unless this holds: perplexity_ratio<=1.15, compression>=0.75; may be given several times."
GateOption = Annotated[list[str], typer.Option("--fail-under", metavar="CONDITION", help=GATE_HELP)]
GATE_FAILED = 3
MODELS_HELP = "Exports (folder or Hub id) with the same base; for baselines alone also a base model, as for compress."
ModelsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="MODEL...", help=MODELS_HELP, show_default=DEFAULT_CHECKPOINT)
]
TaskOption = Annotated[
    list[str],
    typer.Option(
        "--task",
        metavar="TASK[:PATH]",
        help=f"What to measure, of {', '.join(TASKS)}; may be given several times. PATH is a folder, archive or file "
        "of the benchmark's own data, which else is fetched from the Hub (longeval: generated).",
    ),
]
MethodOption = Annotated[
    list[str],
    typer.Option("--method", help=f"Whose cache to score, of {', '.join(METHODS)}; may be given several times."),
]


@verb(eval=EvalConfig)
def evaluate(
    settings: Settings,
    console: Console,
    model: ModelsArgument = None,
    task: TaskOption = ["perplexity"],  # noqa: B006
    method: MethodOption = ["cskv"],  # noqa: B006
    revision: RevisionOption = None,
    fail_under: GateOption = [],  # noqa: B006
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Measure what the smaller cache costs, token by token as if decoded, beside the base model and other methods.

    The run directory is where asvd finds its calibration, and where a GGUF file is converted.
    """
    config = EvalConfig(**settings["eval"])
    tasks, methods = parse_tasks(task), _choices("--method", method, METHODS)
    gates = parsed_gates(fail_under, [name for name, _ in tasks], methods, model or [])
    if "asvd" in methods and not (run / "calibrate" / "manifest.json").exists():
        raise CskvError(f"asvd needs a calibration, and {run} has none", f"run: cskv calibrate MODEL --run {run}")
    from cskv_cli.evaluation.subjects import find_subject
    from cskv_cli.stages.eval import Job
    from cskv_cli.stages.eval import evaluate as score

    subjects = [find_subject(name, methods, run / "converted", revision) for name in model or [DEFAULT_CHECKPOINT]]
    results = score(Job(subjects, methods, config, console.progress, run / "calibrate"), tasks)
    _keep(subjects, config, results, console)
    for note in dict.fromkeys(note for result in results for note in result["notes"]):
        console.warn(note)
    for name, _ in tasks:
        _show(name, [result for result in results if result["task"] == name], console)
    checked = _checked(gates, subjects[0], results)
    content = {**(results[0] if len(results) == 1 else {}), "results": results}
    console.result(content | ({"fail_under": checked} if checked else {}))
    report_gates(console, checked)


def _keep(subjects: list["Subject"], config: EvalConfig, results: list[dict[str, Any]], console: Console) -> None:
    """Leave what was measured of each export where its model card finds it."""
    from cskv_cli.measurements import keep

    try:
        for subject in subjects:
            own = [r for r in results if r["method"] == "cskv" and r["model"] == subject.name]
            keep(subject.folder, config, own)
    except OSError as error:
        console.warn(f"the results are not kept for the model card: {error}")


def parsed_gates(conditions: list[str], tasks: list[str], methods: list[str], models: list[str]) -> list[Gate]:
    """The conditions of --fail-under; one that is none, or on what is not measured, is a usage error."""
    if conditions and ("cskv" not in methods or len(models) > 1):
        raise typer.BadParameter("--fail-under is about one export and its own cache (--method cskv)")
    try:
        return parse_gates(conditions, tasks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _checked(gates: list[Gate], subject: "Subject", results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not gates:
        return []
    from cskv_cli.stages.inspect import compression

    values = values_of([r for r in results if r["method"] == "cskv"], compression(subject.folder))
    return [gate.check(values) for gate in gates]


def report_gates(console: Console, checked: list[dict[str, Any]]) -> None:
    """Say which conditions do not hold, and exit with 3 if there are any."""
    failed = [gate for gate in checked if not gate["passed"]]
    for gate in failed:
        console.fail(f"{gate['condition']} does not hold: it is {gate['value']:.4g}", "")
    if failed:
        raise typer.Exit(GATE_FAILED)


def parse_tasks(given: list[str]) -> list[tuple[str, Path | None]]:
    """Tasks in order, each once, with the path behind a colon."""
    parts = dict(text.strip().partition(":")[::2] for texts in given for text in texts.split(","))
    _choices("--task", list(parts), TASKS)
    for name, path in parts.items():
        if path and name not in BENCHMARKS:
            raise typer.BadParameter(f"{name} takes no path", param_hint="--task")
        if path and not Path(path).exists():
            raise CskvError(f"{path}: no such file or folder", f"name the data of {name} behind --task {name}:")
    return [(name, Path(path) if path else None) for name, path in parts.items()]


def _choices(flag: str, given: list[str], allowed: tuple[str, ...]) -> list[str]:
    """What was given, also separated by commas, each once."""
    names = list(dict.fromkeys(name.strip() for text in given for name in text.split(",")))
    if unknown := [name for name in names if name not in allowed]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(allowed)}", param_hint=flag)
    return names


def _show(task: str, results: list[dict[str, Any]], console: Console) -> None:
    """A table of one task: the base, then a row for each method."""
    first = results[0]
    size = {name: first[f"{name}_bytes_per_token"]["base"] for name in ("cache", "held")}
    rows = [("base", *COLUMNS[task](first, "base"), f"{size['cache']:,}", f"{size['held']:,.0f}")]
    several = len({result["model"] for result in results if result["method"] == "cskv"}) > 1
    for result in results:
        name = result["method"]
        sizes = (result[f"{kind}_bytes_per_token"][name] for kind in ("cache", "held"))
        rows.append((_label(result, several), *COLUMNS[task](result, name), *(f"{size:,.0f}" for size in sizes)))
    header = (TITLES[task](first), *HEADERS[task], "bytes per token", "held here")
    console.table(f"{task} of {', '.join(dict.fromkeys(result['model'] for result in results))}", header, rows)


def _label(result: dict[str, Any], several: bool) -> str:
    if result["method"] == "cskv":
        return f"CSKV, {result['model']}" if several else "CSKV"
    budget = [f"{result[key]}{unit}" for key, unit in (("ratio", ""), ("bits", " bits")) if key in result]
    return " ".join([result["method"], *budget])


def _perplexity(result: dict[str, Any], name: str) -> tuple[str, ...]:
    perplexity = f"{result[name]['perplexity']:.2f}"
    if name == "base":
        return perplexity, "0", "100 %"
    return perplexity, f"{result['kl']:.4f}", f"{result['top1_agreement']:.1%}"


def _share(result: dict[str, Any], name: str) -> tuple[str, ...]:
    return (f"{result[name]['score']:.0%}",)


def _parts(result: dict[str, Any], name: str) -> tuple[str, ...]:
    parts = result[name]["parts"]
    means = [f"{part} {entry['score']:.1%}" for part, entry in parts.items()] if len(parts) <= MOST_PARTS else []
    return f"{result[name]['score']:.1%}", "\n".join(means)


MOST_PARTS = 12
HEADERS = {"perplexity": ("perplexity", "KL per token", "same first choice"), "retrieval": ("found",)}
HEADERS |= dict.fromkeys(BENCHMARKS, ("score", "of which"))
COLUMNS = {"perplexity": _perplexity, "retrieval": _share} | dict.fromkeys(BENCHMARKS, _parts)
TITLES = {
    "perplexity": lambda result: f"{result['tokens']:,} tokens",
    "retrieval": lambda result: f"{result['cases']} lists of {result['entries']} entries",
} | dict.fromkeys(BENCHMARKS, lambda result: f"{result['cases']:,} questions")
