"""`cskv compress`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cskv_cli import recipes
from cskv_cli.commands.out import Out
from cskv_cli.commands.push import Target
from cskv_cli.commands.quantize import UNQUANTIZED, BitsOption, QatOption, bits_settings
from cskv_cli.commands.report import show_checkpoint
from cskv_cli.config import CalibrateConfig, Dtype, ExportConfig, FinetuneConfig, InitConfig, PushConfig, QuantizeConfig
from cskv_cli.console import Console
from cskv_cli.launch import is_main
from cskv_cli.layout import span
from cskv_cli.options import DEFAULT_RUN, ModelArgument, RevisionOption, RunOption, Settings, verb
from cskv_cli.run import Run

if TYPE_CHECKING:
    from cskv_cli.pipeline import Pipeline

_OTHER_WAY = {"rank_k": "ratio_k", "ratio_k": "rank_k", "rank_v": "ratio_v", "ratio_v": "rank_v"}

RecipeOption = Annotated[str | None, typer.Option("--recipe", help="YAML file of settings, or one of ours by name.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Copy the finished checkpoint to this folder.")]
ExportDtypeOption = Annotated[
    Dtype | None, typer.Option("--export-dtype", help="Precision of the exported weights.", show_default="the base's")
]
SHARD_HELP = ExportConfig.model_fields["max_shard_size"].description
ShardOption = Annotated[str | None, typer.Option("--max-shard-size", help=SHARD_HELP, show_default="5GB")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")]


FinetuneOption = Annotated[
    Literal["distill", "reconstruction", "none"] | None,
    typer.Option("--finetune", help="Train the factors, with this objective; none is not to."),
]


@verb(
    without=("qat", "objective"),
    calibrate=CalibrateConfig,
    init=InitConfig,
    finetune=FinetuneConfig,
    quantize=QuantizeConfig,
    push=PushConfig,
)
def compress(
    settings: Settings,
    console: Console,
    model: ModelArgument = None,
    revision: RevisionOption = None,
    recipe: RecipeOption = None,
    out: OutOption = None,
    finetune: FinetuneOption = None,
    bits: BitsOption = None,
    qat: QatOption = False,
    export_dtype: ExportDtypeOption = None,
    max_shard_size: ShardOption = None,
    dry_run: DryOption = False,
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Calibrate, factorize, train and quantize if asked to, and export; what the run directory holds is reused.

    A stage none of whose flags are given keeps the settings it was last made with.
    """
    from cskv_cli.checkpoint.weights import require_disk
    from cskv_cli.pipeline import Pipeline

    exported = {"dtype": export_dtype, "max_shard_size": max_shard_size}
    settings["export"] = {name: value for name, value in exported.items() if value is not None}
    settings["quantize"] = bits_settings(bits, settings["quantize"])
    _training_settings(finetune, qat, settings)
    if recipe is not None:
        model, revision, settings = _merge(recipe, model, revision, settings)
    here = Run(run)
    target = None if out is None else Out(out, here)
    push = PushConfig(**settings["push"])
    with here.lock():
        remote = None if push.push is None or not is_main() else Target(push, here, model, dry=dry_run)
        pipeline = Pipeline(here, model, revision, settings, console)
        wants = {
            "finetune": finetune != "none" and _wanted("finetune", settings["finetune"], here),
            "quantize": bits != UNQUANTIZED and _wanted("quantize", settings["quantize"], here),
        }
        plan = _plan(pipeline, wants)
        if remote is not None:
            remote.check(pipeline)
        if dry_run:
            return _show_plan(plan, console)
        require_disk(run, plan["disk_bytes"], "the run")
        factors = pipeline.init(pipeline.calibrate())
        for stage, wanted in wants.items():
            if wanted:
                factors = getattr(pipeline, stage)(factors)
            else:
                here.discard(stage)
        manifest = pipeline.export(factors.stage)
        if target is not None and is_main():
            target.deliver()
        pushed = None if remote is None else remote.send(pipeline, manifest)
    return show_checkpoint(console, here.folder("export") if out is None else out, manifest.report, pushed)


def _merge(recipe: str, model: str | None, revision: str | None, flags: Settings) -> tuple:
    """The recipe's model and settings, with those given as flags in their place."""
    content = recipes.read(recipes.find(recipe))
    settings = {"push": dict(flags["push"])}
    if settings["push"].get("push") == "":  # the recipe names a repository, but only a flag pushes
        settings["push"]["push"] = content.get("push") or ""
    for stage in recipes.STAGE_CONFIGS:
        given, ours = flags.get(stage, {}), content.get(stage) or {}
        said = {other for name in given for other in (name, _OTHER_WAY.get(name))}
        settings[stage] = {name: value for name, value in ours.items() if name not in said} | given
    if model is None:
        model, revision = content.get("model"), revision or content.get("revision")
    return model, revision, settings


def _training_settings(finetune: str | None, qat: bool, settings: Settings) -> None:
    """Give the training flags to the stages that are told to train; data and lengths are calibration's.

    Raises:
        typer.BadParameter: none is.
    """
    given = settings.pop("finetune")
    only = sorted(given.keys() - CalibrateConfig.model_fields.keys())
    if only and not qat and finetune in (None, "none"):
        raise typer.BadParameter(f"--{only[0]} is a setting of training: give --finetune or --qat too")
    training = {name: value for name, value in given.items() if name not in ("data", "samples", "seq_len")}
    trains = finetune not in (None, "none")
    settings["finetune"] = {"objective": finetune} | training if trains else {}
    if qat:
        settings["quantize"]["qat"] = ({"objective": finetune} if trains else {}) | training


def _wanted(stage: str, given: dict[str, Any], run: Run) -> bool:
    """Whether an optional stage is to be made: if it is asked for, or else if the run did so before."""
    return bool(given.keys() - {"seed"}) or run.manifest(stage) is not None


def _plan(pipeline: "Pipeline", wants: dict[str, bool]) -> dict[str, Any]:
    """What is about to be done; bad settings are refused here, before the long work."""
    from cskv_cli.stages.plan import make_plan

    configs = {stage: pipeline.config(stage, kind) for stage, kind in recipes.STAGE_CONFIGS.items()}
    configs |= {stage: None for stage, wanted in wants.items() if not wanted}
    return make_plan(pipeline.run, pipeline.base, **configs)


def _show_plan(plan: dict[str, Any], console: Console) -> None:
    size = plan["cache_bytes_per_token"]
    console.table(
        f"Plan for {plan['base_model']}",
        ("", ""),
        [
            ("calibration", f"{plan['samples']} windows of {plan['seq_len']} tokens ({', '.join(plan['data'])})"),
            ("ranks", f"keys {span(plan['rank_k'])}, values {span(plan['rank_v'])} of {plan['channels']}"),
            (
                "bits",
                f"keys {span(plan['bits_k'])}, values {span(plan['bits_v'])}" if plan["group"] else "as the model",
            ),
            ("training", ", ".join(f"{t['objective']}, {t['steps']} steps" for t in plan["training"]) or "none"),
            ("cache bytes per token", f"{size['base']:,} -> {size['cskv']:,.0f}"),
            ("factor parameters", f"{plan['factor_parameters']:,}"),
            ("disk", f"{plan['disk_bytes'] / 1e9:.2f} GB, {plan['free_bytes'] / 1e9:.1f} GB free"),
            ("memory", f"{plan['memory_bytes'] / 1e9:.2f} GB"),
        ],
        texts=2,
    )
    console.result(plan)
