"""`cskv compress --dry-run`: what a compression would take and give, from the config alone."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from cskv_cli.allocation import read_allocation
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.classes import empty_base, hidden_size, layer_count
from cskv_cli.checkpoint.layers import compressible_layers
from cskv_cli.checkpoint.weights import free_bytes
from cskv_cli.config import CalibrateConfig, ExportConfig, FinetuneConfig, InitConfig, QuantizeConfig, SearchConfig
from cskv_cli.devices import fast_dtype, multiply_adds_per_second, pick_device
from cskv_cli.layout import Layout, unquantized
from cskv_cli.memory import Shape, base_bytes, bytes_per_token
from cskv_cli.modeling.cskv_structure import find_decoder
from cskv_cli.run import Run
from cskv_cli.stages.export import base_shape, weight_bytes
from cskv_cli.stages.init import layout_for
from cskv_cli.stages.quantize import quantized_layout
from cskv_cli.stages.search import check_budget, frame_of


def make_plan(
    run: Run,
    base: BaseModel,
    calibrate: CalibrateConfig,
    init: InitConfig,
    finetune: FinetuneConfig | None,
    quantize: QuantizeConfig | None,
    export: ExportConfig,
    search: SearchConfig | None = None,
    allocation: Path | None = None,
) -> dict[str, Any]:
    """Ranks, bytes of cache per token, factor parameters, and the disk and memory needed.

    Disk is the run directory's share: statistics, factors in float32 (with their training's state) and the exported
    checkpoint. Memory is that of the largest step, beyond an idle process: calibration, with one decoder layer and the
    hidden states of all windows (or the whole model while it writes text); factorization or export, with all factors;
    or training, with the whole model. `layer` is what one more layer takes of each; its seconds are those of
    calibration, by a matrix product that is tried here. No weight is read: all comes from config.json and the headers
    of the shards.

    Args:
        search: a search that is to be made; ranks and bits are then not known yet, and the factors counted are those
            of full rank.
        allocation: the file that gives ranks and bits.

    Raises:
        CskvError: a rank larger than the cache is wide, a group larger than the window, an allocation of another model
            or a budget that cannot be met.
    """
    config = AutoConfig.from_pretrained(base.folder)
    count = layer_count(config)
    layers, hidden = compressible_layers(config), hidden_size(config)
    spread = lambda rank: tuple(rank if i in layers else None for i in range(count))  # noqa: E731
    stored = getattr(torch, base.dtype)
    dtype = stored if export.dtype == "auto" else getattr(torch, export.dtype)
    compute = stored if calibrate.dtype == "auto" else getattr(torch, calibrate.dtype)
    shape = base_shape(base.folder, dtype)
    if search is not None:
        layout = unquantized(search.window, search.sinks, *[spread(shape.channels)] * 2)
    else:
        layout = _layout(init, quantize, allocation, count, layers, shape)
    columns = hidden + shape.channels // layout.head_groups
    factors = sum(rank or 0 for rank in layout.rank_k + layout.rank_v) * columns
    statistics = len(layers) * hidden * hidden * 4
    weights = weight_bytes(base, export, run.path)
    tokens = calibrate.samples * calibrate.seq_len
    parameters = base.parameter_bytes // stored.itemsize
    in_layer = _layer_parameters(config)
    outer = config.get_text_config(decoder=True).vocab_size * hidden  # the embeddings, in memory all the time
    layer = {
        "memory_bytes": in_layer * compute.itemsize + 3 * hidden * hidden * 8,
        "disk_bytes": (statistics + factors * (4 + dtype.itemsize)) // len(layers),
        "seconds": tokens
        * (in_layer + hidden * hidden)
        / multiply_adds_per_second(pick_device(calibrate.device), compute),
    }
    calibration = outer * compute.itemsize + tokens * hidden * compute.itemsize + layer["memory_bytes"]
    data = list(calibrate.data) or ["self", "builtin"]
    if any(text.split("@")[0] == "self" for text in data):
        calibration = max(calibration, parameters * compute.itemsize)
    factorization = outer * 4 + max(5 * hidden * hidden * 8, factors * (4 + dtype.itemsize))
    trainings = [t for t in (finetune, quantize and quantize.qat) if t is not None]
    training = max(
        (_training_bytes(t, config.get_text_config(decoder=True), parameters, factors) for t in trainings), default=0
    )
    size = bytes_per_token(shape, layout)
    if search is not None:
        size = check_budget(frame_of(base, search), search) * shape.dtype_bytes / 2 / search.tokens
    return {
        "base_model": base.source,
        "data": data,
        "samples": calibrate.samples,
        "seq_len": calibrate.seq_len,
        "rank_k": layout.rank_k,
        "rank_v": layout.rank_v,
        "channels": shape.channels,
        "bits_k": layout.bits_k,
        "bits_v": layout.bits_v,
        "group": layout.group,
        "head_groups": layout.head_groups,
        "window": layout.window,
        "sinks": layout.sinks,
        "search": None if search is None else search.model_dump(mode="json"),
        "cache_bytes_per_token": {"base": base_bytes(shape, layout, 1), "cskv": size},
        "factor_parameters": factors,
        "training": [{"objective": t.objective, "steps": t.steps, "seq_len": t.seq_len} for t in trainings],
        "disk_bytes": weights + factors * (4 + dtype.itemsize + 20 * len(trainings)) + statistics,
        "free_bytes": free_bytes(run.path),
        "memory_bytes": max(calibration, factorization, training),
        "layer": layer,
    }


def _layer_parameters(config: PretrainedConfig) -> int:
    """Of the largest decoder layer."""
    layers = find_decoder(empty_base(config)).layers
    return max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)


def _layout(
    init: InitConfig,
    quantize: QuantizeConfig | None,
    allocation: Path | None,
    count: int,
    layers: list[int],
    shape: Shape,
) -> Layout:
    layout = layout_for(init, allocation, count, layers, shape)
    if quantize is None:
        return layout
    if quantize.allocation is not None and allocation is not None:
        return read_allocation(allocation).layout(count, allocation, layers, shape.channels)
    return quantized_layout(layout, quantize)


def _training_bytes(config: FinetuneConfig, model: PretrainedConfig, parameters: int, factors: int) -> int:
    """The frozen model; factors with gradients, two moments and the best; and for `distill` activations and logits."""
    dtype = fast_dtype(pick_device(config.device)) if config.dtype == "auto" else getattr(torch, config.dtype)
    total = parameters * dtype.itemsize + factors * 5 * 4
    if config.objective == "reconstruction":
        return total
    logits = 6 * config.seq_len * model.vocab_size * 4
    width = 8 * model.hidden_size + 4 * (getattr(model, "intermediate_size", None) or 4 * model.hidden_size)
    layers = 1 if config.checkpointing else model.num_hidden_layers
    return total + logits + config.seq_len * layers * width * dtype.itemsize
