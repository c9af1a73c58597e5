"""`cskv sweep`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cskv_cli import recipes
from cskv_cli.commands.eval import parse_tasks
from cskv_cli.console import Console
from cskv_cli.options import MODEL_HELP, verb
from cskv_cli.run import Run

if TYPE_CHECKING:
    from cskv_cli.pipeline import Pipeline
    from cskv_cli.sweeps import Cell, Sweep

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file, or one of ours by name.")]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP.split(";")[0] + "; by default the recipe's.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder of the sweep.", show_default="sweep-RECIPE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="A value in place of the recipe's: --set eval.cases=8."),
]


@verb()
def sweep(
    console: Console,
    recipe: RecipeArgument,
    model: ModelArgument = None,
    out: OutOption = None,
    change: SetOption = None,
) -> None:
    """Compress and score every combination of the values in RECIPE: a table, and a plot of quality against bytes.

    Each row is kept as soon as it is finished; the same command goes on where it was interrupted.
    """
    from cskv_cli.sweep_report import table, write_report
    from cskv_cli.sweeps import Results, read_sweep

    path = recipes.find(recipe)
    wanted = read_sweep(path, change or [])
    tasks = {text: parse_tasks([text])[0] for text in wanted.tasks}
    folder = out or Path(f"sweep-{path.stem}")
    run = Run(folder / "run")
    with run.lock():
        results = Results(folder / "results.jsonl")
        rows = _rows(wanted, tasks, _pipeline(wanted, model, run, console), results, console)
    report = write_report(folder, rows)
    console.table(f"{path.stem}: {folder}/table.md", *table(rows), texts=report["texts"])
    console.result({"folder": str(folder), "rows": rows, "plots": report["plots"]})


def _pipeline(wanted: "Sweep", model: str | None, run: Run, console: Console) -> "Pipeline":
    """The sweep's run directory, calibrated."""
    from cskv_cli.pipeline import Pipeline

    settings: dict[str, Any] = {"calibrate": wanted.calibrate.model_dump(mode="json")}
    pipeline = Pipeline(run, model or wanted.model, wanted.revision if model is None else None, settings, console)
    if any(cell.method in ("cskv", "asvd") for cell in wanted.cells):
        pipeline.calibrate()
    return pipeline


def _rows(
    wanted: "Sweep", tasks: dict[str, tuple], pipeline: "Pipeline", results: Any, console: Console
) -> list[dict[str, Any]]:
    """The results of every cell, those that are there and those that are made now: `axes` and `tasks` by name."""
    artifact = (pipeline.run.manifest("calibrate") or pipeline.run.manifest("base")).digest
    rows = []
    with console.progress.task("sweep", len(wanted.cells), "rows") as advance:
        for cell in wanted.cells:
            digests = {text: wanted.digest(cell, text, artifact) for text in tasks}
            missing = [text for text, digest in digests.items() if digest not in results.by_digest]
            if missing:
                score = _scorer(wanted, cell, pipeline, console)
                for text in missing:
                    results.add(digests[text], cell, score(tasks[text]))
            scored = {tasks[text][0]: results.by_digest[digest] for text, digest in digests.items()}
            rows.append({"method": cell.method, "axes": cell.axes, "tasks": scored})
            advance(1)
    return rows


def _scorer(wanted: "Sweep", cell: "Cell", pipeline: "Pipeline", console: Console) -> Any:
    """Make the cell's checkpoint, if it has one, and give what scores a task on it."""
    from cskv_cli.evaluation.subjects import Subject
    from cskv_cli.stages.eval import Job, evaluate

    budget = {name: (value,) for name, value in cell.budget.items()}
    config = wanted.eval.model_copy(update=budget)
    subject = Subject(str(pipeline.base.source), pipeline.base.folder, False)
    if cell.stages:
        _make(cell, pipeline)
        subject = Subject("cskv", pipeline.run.folder("export"), True)
    job = Job([subject], [cell.method], config, console.progress, pipeline.run.folder("calibrate"))
    return lambda task: evaluate(job, [task])[0]


def _make(cell: "Cell", pipeline: "Pipeline") -> None:
    """The cell's export; a stage that is as the last cell's is reused."""
    pipeline.settings |= {"finetune": {}, "quantize": {}, "export": {}, **cell.stages}
    factors = pipeline.init(pipeline.calibrate())
    for stage in ("finetune", "quantize"):
        if stage in cell.stages:
            factors = getattr(pipeline, stage)(factors)
        else:
            pipeline.run.discard(stage)
    pipeline.export(factors.stage)
