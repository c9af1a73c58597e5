"""`cskv export`: a standalone checkpoint that `transformers` loads."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.card import PLACEHOLDER, Origin, card_text, shown_name, write_card
from cskv_cli.checkpoint.classes import empty_base
from cskv_cli.checkpoint.load import load_tokenizer, shape_of
from cskv_cli.checkpoint.probe import check_supported
from cskv_cli.checkpoint.sharing import is_linked
from cskv_cli.checkpoint.weights import require_disk
from cskv_cli.checkpoint.writer import write_checkpoint
from cskv_cli.config import ExportConfig, parse_size
from cskv_cli.layout import Layout, load_layout
from cskv_cli.measurements import Measurement
from cskv_cli.memory import Shape, base_bytes, bytes_per_token, cache_bytes
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run
from cskv_cli.stages.base import check_unchanged

CARD_TOKENS = (4096, 32768, 131072)


def export(
    run: Run, base: BaseModel, config: ExportConfig, source: str, inputs: dict[str, str], progress: Progress
) -> Manifest:
    """Write the checkpoint from the factors of stage `source`.

    Raises:
        CskvError: the disk is too small, or the model turns out not to be supported.
    """
    folder = run.folder(source)
    layout = load_layout(folder)
    dtype = _dtype(base, config)
    needed = weight_bytes(base, config, run.path) + sum(path.stat().st_size for path in folder.iterdir())
    require_disk(run.path, needed, "the exported checkpoint")
    check_supported(base.folder)
    partial = run.partial("export", {"config": config.model_dump(mode="json"), "inputs": inputs})
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with run.offload() as offload:
        limit = parse_size(config.max_shard_size)
        write_checkpoint(partial, base, layout, folder, dtype, limit, offload, progress, copy=config.copy_shards)
    report = describe(base, layout, dtype, run.manifest("init").report["relative_error"])
    report["trained"] = {"finetune", "qat"} & _lineage(run, source).keys() != set()
    write_card(partial, card_text(base, layout, report, origin(run, base, config, source)))
    if any((base.folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        load_tokenizer(partial)
    check_unchanged(run, base)
    return run.commit("export", partial, config, inputs, report)


def preview_card(
    run: Run,
    base: BaseModel,
    config: ExportConfig,
    source: str,
    measured: Sequence[Measurement] = (),
    repo: str = PLACEHOLDER,
) -> str:
    """The card that the export from stage `source` gets in repository `repo`, with what was measured of it."""
    layout = load_layout(run.folder(source))
    report = describe(base, layout, _dtype(base, config), run.manifest("init").report["relative_error"])
    return card_text(base, layout, report, origin(run, base, config, source, measured), repo)


def origin(
    run: Run, base: BaseModel, config: ExportConfig, source: str, measured: Sequence[Measurement] = ()
) -> Origin:
    """The recipe of an export, without the folders of this machine."""
    settings = _lineage(run, source)
    settings["export"] = config.model_dump(mode="json", exclude={"factors", "copy_shards"})
    qat = settings.pop("qat", None)
    readers = [part for part in (settings["calibrate"], *map(settings.get, ("search", "finetune")), qat) if part]
    texts = list(dict.fromkeys(text for part in readers for text in part["data"]))
    for part in readers:
        names = [text.rsplit("/", 1)[-1] if text[0] == "/" else text for text in part["data"]]
        part |= {"device": None, "data": names}
    if qat is not None:
        settings["quantize"]["qat"] = qat
    for stage in ("init", "quantize"):
        if path := settings.get(stage, {}).get("allocation"):
            settings[stage]["allocation"] = Path(path).name
    for name in "kv":
        if settings["init"][f"rank_{name}"] is not None:
            del settings["init"][f"ratio_{name}"]
    recipe = {"model": shown_name(base), "revision": base.revision} | settings
    return Origin(
        _without_empty(recipe), [text.split("#")[0].split(":")[0] for text in texts if _is_hub(text)], measured
    )


def _lineage(run: Run, source: str) -> dict[str, dict[str, Any]]:
    """Settings of the stages that the factors of `source` went through, and of the training in `quantize` as "qat"."""
    stages, quantized = ["calibrate", "init"], source == "quantize"
    if "search" in run.manifest("init").inputs:
        stages.insert(1, "search")
    if source == "finetune" or quantized and "finetune" in run.manifest("quantize").inputs:
        stages.append("finetune")
    settings = {stage: dict(run.manifest(stage).config) for stage in stages + ["quantize"] * quantized}
    if quantized and (qat := settings["quantize"].get("qat")) is not None:
        settings["qat"] = dict(qat)
    return settings


def _is_hub(text: str) -> bool:
    return "/" in text and text[0] != "/"


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value not in (None, [], {})}


def weight_bytes(base: BaseModel, config: ExportConfig, place: Path) -> int:
    """Bytes that the base's weights take on the disk in an export under `place`; clones count as copies."""
    dtype, limit = _dtype(base, config), parse_size(config.max_shard_size)
    if dtype != getattr(torch, base.dtype):
        return base.parameter_bytes * dtype.itemsize // getattr(torch, base.dtype).itemsize
    linked = not config.copy_shards and is_linked(base, place)
    return sum(size for path in base.shards if (size := path.stat().st_size) > limit or not linked)


def _dtype(base: BaseModel, config: ExportConfig) -> torch.dtype:
    return getattr(torch, base.dtype if config.dtype == "auto" else config.dtype)


def describe(base: BaseModel, layout: Layout, dtype: torch.dtype, relative_error: dict[str, float]) -> dict:
    """What a checkpoint is, for `--json`, `status` and the model card."""
    shape = base_shape(base.folder, dtype)
    return {
        "base_model": base.source,
        "dtype": str(dtype).removeprefix("torch."),
        "rank_k": layout.rank_k,
        "rank_v": layout.rank_v,
        "channels": shape.channels,
        "bits_k": layout.bits_k,
        "bits_v": layout.bits_v,
        "group": layout.group,
        "head_groups": layout.head_groups,
        "window": layout.window,
        "sinks": layout.sinks,
        "cache_bytes_per_token": {
            "base": base_bytes(shape, layout, 1),
            "cskv": bytes_per_token(shape, layout),
        },
        "cache_bytes": {
            str(tokens): {"base": base_bytes(shape, layout, tokens), "cskv": cache_bytes(shape, layout, tokens)}
            for tokens in CARD_TOKENS
        },
        "relative_error": relative_error,
    }


def base_shape(folder: Path, dtype: torch.dtype) -> Shape:
    """Channels and precision of the base's cache, from its config alone."""
    from transformers import AutoConfig

    return replace(shape_of(empty_base(AutoConfig.from_pretrained(folder))), dtype_bytes=dtype.itemsize)
