"""`cskv bench`: what decoding with the smaller cache costs and saves, beside the base's caches."""

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, QuantizedCache, StaticCache

from cskv_cli.checkpoint.load import layout_of, load_checkpoint, shape_of
from cskv_cli.checkpoint.weights import read_json
from cskv_cli.costs import Machine, base_step, cskv_step, dims_of, measure_machine, now
from cskv_cli.devices import pick_device
from cskv_cli.errors import CskvError
from cskv_cli.eval_config import BenchConfig
from cskv_cli.evaluation.footprint import decoding_peak
from cskv_cli.evaluation.held import reachable_bytes
from cskv_cli.memory import base_bytes, cache_bytes
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.modeling_cskv import CACHE
from cskv_cli.progress import Advance, Progress
from cskv_cli.stages.inspect import reach

BASE, OURS = "base", "cskv"
BACKENDS = {"quanto": "optimum", "hqq": "hqq"}  # of transformers' QuantizedCache, and their packages
NewCache = Callable[[PretrainedConfig, int], Cache]


def caches(device: str) -> tuple[dict[str, NewCache], dict[str, str]]:
    """How to make each cache for so many tokens, by name; and why others are left out.

    The base is the same weights with a `DynamicCache`.
    """
    found: dict[str, NewCache] = {
        BASE: lambda config, tokens: DynamicCache(config=config),
        OURS: lambda config, tokens: CSKVCache(config),
        "static": lambda config, tokens: StaticCache(config=config, max_cache_len=tokens),
    }
    skipped = {}
    if backend := next((name for name, package in BACKENDS.items() if find_spec(package)), None):
        found["quantized"] = lambda config, tokens: QuantizedCache(backend, config)
    else:
        skipped["quantized"] = f"transformers' QuantizedCache needs {' or '.join(BACKENDS)}, and neither is installed"
    if device == "cuda":
        found["offloaded"] = lambda config, tokens: DynamicCache(config=config, offloading=True)
    else:
        skipped["offloaded"] = f"transformers offloads from a CUDA device only, and this is {device}"
    return found, skipped


def bench(folder: Path, config: BenchConfig, progress: Progress) -> dict[str, Any]:
    """Time and memory of each cache, at each context and batch.

    Raises:
        CskvError: a context is longer than the model's, or the checkpoint cannot be loaded.
    """
    _check_length(folder, config)
    device = pick_device(config.device)
    kinds, skipped = caches(device)
    sizes = [(context, batch) for context in config.context for batch in config.batch]
    model = load_checkpoint(folder, device, config.dtype)
    machine, rows = measure_machine(device, model.dtype), []
    with progress.task("bench", len(sizes) * len(kinds) * (config.prefills + config.new_tokens), "forwards") as advance:
        for size in sizes:
            rows += _with_limits(_measure(model, kinds, config, *size, advance), model, machine, config.new_tokens)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    shape, layout, dtype = shape_of(model), layout_of(model), str(model.dtype).removeprefix("torch.")
    room = max(config.memory_bytes - weights, 0)
    del model
    with progress.task("memory", len(rows), "processes") as advance:
        for row in rows:
            row["memory"] = decoding_peak(_decode_alone, folder, device, dtype, row["cache"], config, row)
            advance(1)
    return {
        "checkpoint": str(folder),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "new_tokens": config.new_tokens,
        "prefills": config.prefills,
        "machine": {"operations_per_second": machine.operations, "bytes_per_second": machine.bytes},
        "rows": rows,
        "skipped": skipped,
        "memory": config.memory,
        "longest": {str(batch): reach(shape, layout, room // batch) for batch in config.batch},
    }


def _check_length(folder: Path, config: BenchConfig) -> None:
    limit = read_json(folder / "config.json").get("max_position_embeddings")
    longest = max(config.context) + config.new_tokens
    if limit is not None and longest > limit:
        raise CskvError(f"{longest:,} tokens are more than the model's {limit:,}", "give a shorter --context")


@torch.inference_mode()
def _measure(
    model: PreTrainedModel, kinds: dict[str, NewCache], config: BenchConfig, context: int, batch: int, advance: Advance
) -> list[dict[str, Any]]:
    """A row for each cache. They take turns, so that what else the machine does meets all of them."""
    ids, total = _prompt(model, context, batch), context + config.new_tokens
    prefill: dict[str, list[float]] = {name: [] for name in kinds}
    decode: dict[str, list[float]] = {name: [] for name in kinds}
    held, last = {}, {}
    for _ in range(config.prefills):
        for name, new_cache in kinds.items():
            held[name] = new_cache(model.config, total)
            last[name] = _timed(model, ids, held[name], prefill[name])
            advance(1)
    for _ in range(config.new_tokens):
        for name, cache in held.items():
            last[name] = _timed(model, last[name], cache, decode[name])
            advance(1)
    shape, layout = shape_of(model), layout_of(model)
    formula = {BASE: batch * base_bytes(shape, layout, total), OURS: batch * cache_bytes(shape, layout, total)}
    return [
        {
            "context": context,
            "batch": batch,
            "cache": name,
            "prefill_seconds": _spread(prefill[name], prefill[BASE]),
            "decode_seconds": _spread(decode[name], decode[BASE]),
            "tokens_per_second": batch / statistics.median(decode[name]),
            "cache_bytes": {"formula": formula.get(name), "held": reachable_bytes(cache)},
        }
        for name, cache in held.items()
    ]


def _with_limits(
    rows: list[dict[str, Any]], model: PreTrainedModel, machine: Machine, new_tokens: int
) -> list[dict[str, Any]]:
    """The rows, with what a step must cost halfway through decoding, and how much of its time that is.

    The base's other caches have its limit, but a quantized or offloaded one has none that is known here.
    """
    layout, dims = layout_of(model), dims_of(model, shape_of(model))
    for row in rows:
        tokens, batch = row["context"] + new_tokens // 2, row["batch"]
        base = base_step(dims, layout, tokens, batch)
        step = {BASE: base, "static": base, OURS: cskv_step(dims, layout, tokens, batch)}.get(row["cache"])
        row["limit"] = step and {
            "multiply_adds": step.multiply_adds,
            "bytes": step.bytes,
            "seconds": step.seconds(machine),
            "to_base": step.seconds(machine) / base.seconds(machine),
            "reached": step.seconds(machine) / row["decode_seconds"]["median"],
        }
    return rows


def _prompt(model: PreTrainedModel, context: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(3, size, (batch, context), generator=generator).to(model.device)


def _timed(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, seconds: list[float]) -> torch.Tensor:
    """The next tokens [batch, 1]; the time of the forward goes to `seconds`."""
    began = now()
    logits = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits
    seconds.append(now() - began)
    return logits.argmax(-1)


def _spread(seconds: list[float], base: list[float]) -> dict[str, float]:
    """Median and range, and the median of the ratios to the base's forwards of the same turn."""
    ratios = [ours / theirs for ours, theirs in zip(seconds, base, strict=True)]
    return {
        "median": statistics.median(seconds),
        "least": min(seconds),
        "greatest": max(seconds),
        "to_base": statistics.median(ratios),
    }


def _decode_alone(
    folder: Path, device: str, dtype: str, name: str, config: BenchConfig, row: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Loads the model; then what reads the context, and what decodes after it."""
    model = load_checkpoint(folder, device, dtype)
    cache = caches(device)[0][name](model.config, row["context"] + config.new_tokens)
    ids = _prompt(model, row["context"], row["batch"])

    @torch.inference_mode()
    def prefill() -> None:
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})

    @torch.inference_mode()
    def decode() -> None:
        for _ in range(config.new_tokens):
            model(ids[:, :1], use_cache=True, **{CACHE: cache})

    return prefill, decode
