"""`cskv compress`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cskv_cli import recipes
from cskv_cli.commands.out import Out
from cskv_cli.commands.push import Target
from cskv_cli.commands.quantize import UNQUANTIZED, BitsOption, bits_settings
from cskv_cli.commands.report import show_checkpoint
from cskv_cli.config import CalibrateConfig, Dtype, ExportConfig, InitConfig, PushConfig, QuantizeConfig
from cskv_cli.console import Console
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


@verb(calibrate=CalibrateConfig, init=InitConfig, quantize=QuantizeConfig, push=PushConfig)
def compress(
    settings: Settings,
    console: Console,
    model: ModelArgument = None,
    revision: RevisionOption = None,
    recipe: RecipeOption = None,
    out: OutOption = None,
    bits: BitsOption = None,
    export_dtype: ExportDtypeOption = None,
    max_shard_size: ShardOption = None,
    dry_run: DryOption = False,
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Calibrate, factorize, quantize if bits are given, and export; what the run directory holds is reused.

    A stage none of whose flags are given keeps the settings it was last made with.
    """
    from cskv_cli.checkpoint.weights import require_disk
    from cskv_cli.pipeline import Pipeline

    exported = {"dtype": export_dtype, "max_shard_size": max_shard_size}
    settings["export"] = {name: value for name, value in exported.items() if value is not None}
    settings["quantize"] = bits_settings(bits, settings["quantize"])
    if recipe is not None:
        model, revision, settings = _merge(recipe, model, revision, settings)
    here = Run(run)
    target = None if out is None else Out(out, here)
    push = PushConfig(**settings["push"])
    with here.lock():
        remote = None if push.push is None else Target(push, here, model, dry=dry_run)
        pipeline = Pipeline(here, model, revision, settings, console)
        quantizes = _quantizes(bits, settings["quantize"], here)
        plan = _plan(pipeline, quantizes)
        if remote is not None:
            remote.check(pipeline)
        if dry_run:
            return _show_plan(plan, console)
        require_disk(run, plan["disk_bytes"], "the run")
        factors = pipeline.init(pipeline.calibrate())
        if quantizes:
            factors = pipeline.quantize(factors)
        else:
            here.discard("quantize")
        manifest = pipeline.export(factors.stage)
        if target is not None:
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


def _quantizes(bits: int | None, given: dict[str, Any], run: Run) -> bool:
    """Whether to quantize: if bits are given, or else if the run did so before; a seed alone says nothing."""
    if bits == UNQUANTIZED:
        return False
    return bool(given.keys() - {"seed"}) or run.manifest("quantize") is not None


def _plan(pipeline: "Pipeline", quantizes: bool) -> dict[str, Any]:
    """What is about to be done; bad settings are refused here, before the long work."""
    from cskv_cli.stages.plan import make_plan

    configs = {stage: pipeline.config(stage, kind) for stage, kind in recipes.STAGE_CONFIGS.items()}
    if not quantizes:
        configs["quantize"] = None
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
            ("cache bytes per token", f"{size['base']:,} -> {size['cskv']:,.0f}"),
            ("factor parameters", f"{plan['factor_parameters']:,}"),
            ("disk", f"{plan['disk_bytes'] / 1e9:.2f} GB, {plan['free_bytes'] / 1e9:.1f} GB free"),
            ("memory", f"{plan['memory_bytes'] / 1e9:.2f} GB"),
        ],
        texts=2,
    )
    console.result(plan)
