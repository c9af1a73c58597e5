"""`cskv compress`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cskv_cli import recipes
from cskv_cli.allocation import AUTO
from cskv_cli.commands.out import Out
from cskv_cli.commands.push import Target
from cskv_cli.commands.quantize import UNQUANTIZED, BitsOption, QatOption, bits_settings
from cskv_cli.commands.report import show_checkpoint
from cskv_cli.config import (
    CalibrateConfig,
    Dtype,
    ExportConfig,
    FinetuneConfig,
    InitConfig,
    PushConfig,
    QuantizeConfig,
    SearchConfig,
)
from cskv_cli.console import Console
from cskv_cli.launch import is_main
from cskv_cli.layout import bits_span, span
from cskv_cli.options import DEFAULT_RUN, ModelArgument, RevisionOption, RunOption, Settings, TrustOption, verb
from cskv_cli.run import Run

if TYPE_CHECKING:
    from cskv_cli.pipeline import Pipeline

_OTHER_WAY = {"rank_k": "ratio_k", "ratio_k": "rank_k", "rank_v": "ratio_v", "ratio_v": "rank_v"}

_FORMS = {"budget", "bytes_per_token", "memory"}
_RANKS = {"rank_k", "ratio_k", "rank_v", "ratio_v"}

RecipeOption = Annotated[str | None, typer.Option("--recipe", help="YAML file of settings, or one of ours by name.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Copy the finished checkpoint to this folder.")]
ExportDtypeOption = Annotated[
    Dtype | None, typer.Option("--export-dtype", help="Precision of the exported weights.", show_default="the base's")
]
SHARD_HELP = ExportConfig.model_fields["max_shard_size"].description
ShardOption = Annotated[str | None, typer.Option("--max-shard-size", help=SHARD_HELP, show_default="5GB")]
COPY_HELP = ExportConfig.model_fields["copy_shards"].description
CopyOption = Annotated[bool | None, typer.Option("--copy/--no-copy", help=COPY_HELP, show_default="no-copy")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")]


FinetuneOption = Annotated[
    Literal["distill", "reconstruction", "none"] | None,
    typer.Option("--finetune", help="Train the factors, with this objective; none is not to."),
]


@verb(
    without=("qat", "objective"),
    calibrate=CalibrateConfig,
    search=SearchConfig,
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
    trust_remote_code: TrustOption = False,
    recipe: RecipeOption = None,
    out: OutOption = None,
    finetune: FinetuneOption = None,
    bits: BitsOption = None,
    qat: QatOption = False,
    export_dtype: ExportDtypeOption = None,
    max_shard_size: ShardOption = None,
    copy: CopyOption = None,
    dry_run: DryOption = False,
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Calibrate, factorize, train and quantize if asked to, and export; what the run directory holds is reused.

    With --budget (or --bytes-per-token, --memory) a search chooses rank and bits of each layer.
    A stage none of whose flags are given keeps the settings it was last made with.
    """
    from cskv_cli.checkpoint.weights import require_disk
    from cskv_cli.pipeline import Pipeline

    exported = {"dtype": export_dtype, "max_shard_size": max_shard_size, "copy_shards": copy}
    settings["export"] = {name: value for name, value in exported.items() if value is not None}
    settings["quantize"] = bits_settings(bits, settings["quantize"])
    _training_settings(finetune, qat, settings)
    settings["search"] = {name: v for name, v in settings["search"].items() if name not in ("data", "seq_len")}
    if recipe is not None:
        model, revision, settings = _merge(recipe, model, revision, settings)
    here = Run(run)
    searches = _search_settings(settings, bits, here)
    target = None if out is None else Out(out, here)
    push = PushConfig(**settings["push"])
    with here.lock():
        remote = None if push.push is None or not is_main() else Target(push, here, model, dry=dry_run)
        pipeline = Pipeline(here, model, revision, settings, console, dry=dry_run, trust_code=trust_remote_code)
        wants = {
            "finetune": finetune != "none" and _wanted("finetune", settings["finetune"], here),
            "quantize": bits != UNQUANTIZED and _wanted("quantize", settings["quantize"], here),
        }
        if not settings["quantize"] and _allocated("quantize", here) and not _keeps_allocation(settings, here):
            wants["quantize"] = False  # its bits were another allocation's
        plan = _plan(pipeline, wants, searches)
        if remote is not None:
            remote.check(pipeline)
        if dry_run:
            return _show_plan(plan, console)
        require_disk(run, plan["disk_bytes"], "the run")
        calibrated = pipeline.calibrate()
        if searches:
            pipeline.search()
        factors = pipeline.init(calibrated)
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
        said |= _FORMS if _FORMS & given.keys() else set()
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


def _search_settings(settings: Settings, bits: int | None, run: Run) -> bool:
    """Whether a search gives ranks and bits; the stages behind it are then told so.

    Raises:
        typer.BadParameter: ranks or bits are given beside a budget, or settings of a search without one.
    """
    search, init, quantize = settings["search"], settings["init"], settings["quantize"]
    if not _FORMS & search.keys():
        shared = (InitConfig, QuantizeConfig, CalibrateConfig, FinetuneConfig)
        if only := sorted(search.keys() - {name for config in shared for name in config.model_fields}):
            raise typer.BadParameter(f"--{only[0].replace('_', '-')} is a setting of a search: give --budget too")
        settings["search"] = {}
        if init.get("allocation") == AUTO:
            return False  # the search that is there
        return not init and _allocated("init", run) and run.manifest("search") is not None
    if said := sorted((init.keys() & (_RANKS | {"allocation"})) | (quantize.keys() & {"bits_k", "bits_v"})):
        raise typer.BadParameter(f"a budget chooses ranks and bits: give no --{said[0].replace('_', '-')} beside it")
    if bits is not None:
        raise typer.BadParameter("a budget chooses ranks and bits: give no --bits beside it")
    for stage, names in ((init, ("window", "sinks")), (quantize, ("group",))):
        for name in names:
            if name in stage:
                search.setdefault(name, stage.pop(name))
    init["allocation"] = quantize["allocation"] = AUTO
    return True


def _allocated(stage: str, run: Run) -> bool:
    """Whether a stage was last made with the run's own allocation."""
    manifest = run.manifest(stage)
    return manifest is not None and manifest.config.get("allocation") == AUTO


def _keeps_allocation(settings: Settings, run: Run) -> bool:
    init = settings["init"]
    return init.get("allocation") is not None if init else _allocated("init", run)


def _wanted(stage: str, given: dict[str, Any], run: Run) -> bool:
    """Whether an optional stage is to be made: if it is asked for, or else if the run did so before."""
    return bool(given.keys() - {"seed"}) or run.manifest(stage) is not None


def _plan(pipeline: "Pipeline", wants: dict[str, bool], searches: bool) -> dict[str, Any]:
    """What is about to be done; bad settings are refused here, before the long work."""
    from cskv_cli.stages.plan import make_plan

    kinds = {stage: kind for stage, kind in recipes.STAGE_CONFIGS.items() if stage != "search"}
    configs = {stage: pipeline.config(stage, kind) for stage, kind in kinds.items()}
    configs |= {stage: None for stage, wanted in wants.items() if not wanted}
    asked = searches and bool(pipeline.settings["search"])
    configs["search"] = pipeline.config("search", SearchConfig) if asked else None
    path = None if asked else pipeline.allocation(configs["init"])[0]
    return make_plan(pipeline.run, pipeline.base, allocation=path, **configs)


def _what(plan: dict[str, Any]) -> list[tuple[str, str]]:
    if plan["search"] is not None:
        return [("ranks and bits", "chosen by a search (cskv search --dry-run tells how long it takes)")]
    ranks = f"keys {span(plan['rank_k'])}, values {span(plan['rank_v'])} of {plan['channels']}"
    keys, values = (bits_span(plan[f"bits_{x}"], plan[f"rank_{x}"]) for x in "kv")
    return [("ranks", ranks), ("bits", f"keys {keys}, values {values}" if plan["group"] else "as the model")]


def _show_plan(plan: dict[str, Any], console: Console) -> None:
    size, layer = plan["cache_bytes_per_token"], plan["layer"]
    console.table(
        f"Plan for {plan['base_model']}",
        ("", ""),
        [
            ("calibration", f"{plan['samples']} windows of {plan['seq_len']} tokens ({', '.join(plan['data'])})"),
            *_what(plan),
            ("training", ", ".join(f"{t['objective']}, {t['steps']} steps" for t in plan["training"]) or "none"),
            ("cache bytes per token", f"{size['base']:,} -> {size['cskv']:,.0f}"),
            ("factor parameters", f"{plan['factor_parameters']:,}"),
            ("disk", f"{plan['disk_bytes'] / 1e9:.2f} GB, {plan['free_bytes'] / 1e9:.1f} GB free"),
            ("memory", f"{plan['memory_bytes'] / 1e9:.2f} GB beyond an idle process"),
            (
                "a layer",
                f"{layer['memory_bytes'] / 1e9:.2f} GB of memory, {layer['disk_bytes'] / 1e9:.2f} GB of disk, about "
                f"{layer['seconds']:.1f} s of calibration",
            ),
        ],
        texts=2,
    )
    console.result(plan)
