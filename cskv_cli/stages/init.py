"""`cskv init`: factors of every key and value projection, and the layout of the cache they are for."""

import functools
import math
from pathlib import Path

import torch
from torch import nn

from cskv_cli import factors, statistics
from cskv_cli.allocation import read_allocation
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.classes import layer_count
from cskv_cli.checkpoint.layers import compressible_layers, in_memory, kv_projections, load_by_layer
from cskv_cli.checkpoint.load import shape_of
from cskv_cli.config import InitConfig
from cskv_cli.errors import CskvError
from cskv_cli.factorize import METHODS, Context, squared_error
from cskv_cli.factorize.groups import factorized
from cskv_cli.layout import Layout, save_layout, unquantized
from cskv_cli.memory import Shape
from cskv_cli.modeling.cskv_structure import attentions
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run
from cskv_cli.spectrum import rank_at


def rank_of(config: InitConfig, name: str, channels: int) -> int:
    """Channels to keep: the rank given, or what the ratio leaves, at least 1; with head groups, the nearest multiple.

    Raises:
        CskvError: a rank larger than the projection has channels, or one that does not divide by the head groups.
    """
    groups, rank = config.head_groups, getattr(config, f"rank_{name}")
    if rank is None:
        return max(round(rank_at(getattr(config, f"ratio_{name}"), channels) / groups), 1) * groups
    if rank % groups:
        raise CskvError(
            f"--rank-{name} {rank} does not divide by {groups} head groups",
            f"give --rank-{name} {-(-rank // groups) * groups}, or a --ratio-{name}, which is rounded",
        )
    if rank > channels:
        raise CskvError(
            f"--rank-{name} {rank} is more than the {channels} channels the cache has", "give a smaller one"
        )
    return rank


def layout_for(config: InitConfig, allocation: Path | None, count: int, layers: list[int], shape: Shape) -> Layout:
    """The ranks that `config` asks for, or those of an allocation, without its bits.

    Raises:
        CskvError: a rank larger than the projection has channels, an allocation that is not for this model, or head
            groups that the key and value heads cannot be divided into.
    """
    if allocation is not None:
        full = read_allocation(allocation).layout(count, allocation, layers, shape.channels)
        return unquantized(full.window, full.sinks, full.rank_k, full.rank_v, full.whole)
    if shape.heads % config.head_groups:
        raise CskvError(
            f"{shape.heads} KV heads do not divide into --head-groups {config.head_groups}",
            f"give a divisor of {shape.heads}",
        )
    ranks = {name: rank_of(config, name, shape.channels) for name in "kv"}
    k, v = (tuple(ranks[name] if i in layers else None for i in range(count)) for name in "kv")
    return unquantized(config.window, config.sinks, k, v).model_copy(update={"head_groups": config.head_groups})


def init(
    run: Run,
    base: BaseModel,
    config: InitConfig,
    inputs: dict[str, str],
    progress: Progress,
    allocation: Path | None = None,
) -> Manifest:
    """Factorize layer by layer; a layer finished before an interruption is not done again.

    The report holds the relative error ||X W - X A B|| / ||X W|| on the calibration tokens X, per layer and over all.
    """
    partial = run.partial("init", {"config": config.model_dump(mode="json"), "inputs": inputs})
    partial.mkdir(parents=True, exist_ok=True)
    with run.offload() as offload:
        model = load_by_layer(base.folder, offload, dtype=torch.float32, device="cpu")
        layers = compressible_layers(model.config)
        shape, count = shape_of(model), layer_count(model.config)
        layout = layout_for(config, allocation, count, layers, shape)
        errors = []
        modules = attentions(model)
        with progress.task("factorize", len(layout.layers), "layers") as advance:
            for i in layout.layers:
                ranks = {"k": layout.rank_k[i], "v": layout.rank_v[i]}
                errors.append(_layer(run, partial, modules[i], i, ranks, config))
                advance(1)
    save_layout(partial, layout)
    return run.commit("init", partial, config, inputs, _report(layout.layers, errors))


def _layer(
    run: Run, partial: Path, attention: nn.Module, index: int, ranks: dict[str, int], config: InitConfig
) -> dict:
    """Factorize one layer unless it is there; gives {"k": (squared error, squared norm), "v": ...}."""
    stats = statistics.load_layer(run.folder("calibrate"), index)
    gram = stats.gram.double()
    done = statistics.is_whole(statistics.layer_file(partial, index))
    result, sizes = factors.load_layer(partial, index) if done else {}, {}
    with in_memory(attention):
        weights = {name: weight.double() for name, (weight, _) in kv_projections(attention).items()}
    for position, (name, weight) in enumerate(weights.items()):
        if not done:
            generator = torch.Generator().manual_seed(config.seed * 10_000 + index * 2 + position)
            context = Context(gram, stats.mean_abs.double(), config.alpha, generator)
            method = functools.partial(METHODS[config.method], context=context)
            a, b = factorized(method, weight, ranks[name], config.head_groups)
            result |= {f"{name}.a": a.float(), f"{name}.b": b.float()}
        sizes[name] = squared_error(weight, result[f"{name}.a"].double(), result[f"{name}.b"].double(), gram)
    if not done:
        factors.save_layer(partial, index, result)
    return sizes


def _report(layers: list[int], errors: list[dict]) -> dict:
    """Relative errors; float noise below zero counts as zero."""
    relative = lambda parts: math.sqrt(max(sum(e for e, _ in parts), 0) / sum(n for _, n in parts))  # noqa: E731
    return {
        "layers": [
            {"index": i} | {name: relative([sizes[name]]) for name in "kv"}
            for i, sizes in zip(layers, errors, strict=True)
        ],
        "relative_error": {name: relative([sizes[name] for sizes in errors]) for name in "kv"},
    }
