"""`cskv search`: rank and bits for the keys and values of each layer, under a budget of bytes."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.classes import layer_count
from cskv_cli.checkpoint.layers import compressible_layers
from cskv_cli.checkpoint.load import load_tokenizer
from cskv_cli.config import DataConfig, SearchConfig
from cskv_cli.devices import pick_device
from cskv_cli.errors import CskvError
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run, write_json
from cskv_cli.search.baselines import KIVI_BITS, kivi_bytes
from cskv_cli.search.combine import DIRECTIONS, Tilt, allocate, smallest_bytes, uniform_settings
from cskv_cli.search.costs import ItemCosts, measured_options
from cskv_cli.search.figures import plot_allocation, plot_front
from cskv_cli.search.journal import Journal, read
from cskv_cli.search.measure import Measurer, parse_setting
from cskv_cli.search.options import Frame, Item, Setting
from cskv_cli.search.report import baseline_line, describe, front, line, save_allocation
from cskv_cli.search.simulator import Simulator
from cskv_cli.stages.calibrate import kept_windows
from cskv_cli.stages.export import base_shape
from cskv_cli.training.stream import Stream, windows_needed

JOURNAL, WINDOWS, REPORT = "measurements.jsonl", "windows.safetensors", "report.json"
UNIFORM = 3  # uniform settings measured, those of least predicted KL


def frame_of(base: BaseModel, config: SearchConfig) -> Frame:
    """The model's cache in 16 bits, whatever its weights are stored in.

    Raises:
        CskvError: it has nothing to compress.
    """
    model = AutoConfig.from_pretrained(base.folder)
    layers, count = compressible_layers(model), layer_count(model)
    shape = base_shape(base.folder, torch.bfloat16)
    return Frame(shape, tuple(layers), count, config.window, config.sinks, config.group, config.tokens)


def check_budget(frame: Frame, config: SearchConfig) -> int:
    """Bytes that the cache may take.

    Raises:
        CskvError: no setting is that small, or the base's cache is no larger.
    """
    budget, least = config.limit(frame.base_bytes), smallest_bytes(frame)
    sizes = f"at {frame.tokens:,} tokens the base's cache takes {frame.base_bytes:,} bytes"
    if budget < least:
        raise CskvError(
            f"the budget of {budget:,} bytes is less than the {least:,} of the smallest cache; {sizes}",
            f"give a --budget of at most {1 - least / frame.base_bytes:.3f}, or a smaller --window or --sinks",
        )
    if budget >= frame.base_bytes:
        raise CskvError(f"nothing to compress: the budget is {budget:,} bytes; {sizes}", "give a smaller budget")
    return budget


def search(run: Run, base: BaseModel, config: SearchConfig, inputs: dict[str, str], progress: Progress) -> Manifest:
    """Measure, combine, verify and refine; write the allocation, the report, the figures and all measurements.

    Measurements depend on neither budget nor context: a later search with another budget makes only new ones.

    Raises:
        CskvError: the budget cannot be met, or there is too little text.
    """
    frame = frame_of(base, config)
    budget, began = check_budget(frame, config), time.monotonic()
    partial = run.partial("search", _measuring(config) | {"inputs": inputs})
    partial.mkdir(parents=True, exist_ok=True)
    candidates = len(frame.items) * len(measured_options(frame.shape.channels))
    total = candidates + UNIFORM + 1 + config.rounds + len(KIVI_BITS)
    with progress.task("search", total, "measurements") as advance:
        measurer = _measurer(run, base, config, frame, partial, inputs, progress, advance)
        left = lambda reserve: config.max_evals is None or measurer.made < config.max_evals - reserve  # noqa: E731
        costs = measure_candidates(
            measurer, lambda: left(min(UNIFORM + 1 + config.rounds, (config.max_evals or 0) // 2))
        )
        results = combine(measurer, costs, budget, config.rounds, lambda: left(0))
        baselines = measure_baselines(measurer, lambda: left(0))
    best = min(results, key=lambda result: result["kl"])
    report = describe(measurer, config, budget, results, baselines, best, costs) | {
        "measurements_made": measurer.made,
        "seconds": round(time.monotonic() - began, 1),
    }
    setting = parse_setting(frame, best["setting"])
    save_allocation(partial, frame, setting, best, report)
    write_json(partial / REPORT, report)
    plot_allocation(partial / "allocation.png", frame, setting)
    others = [result for result in results if result is not best]
    plot_front(partial / "front.png", front(frame, costs), others, baselines, best)
    (partial / WINDOWS).unlink(missing_ok=True)
    summary = {name: value for name, value in report.items() if name not in ("front", "single")}
    return run.commit("search", partial, config, inputs, summary)


def plan(run: Run, base: BaseModel, config: SearchConfig, inputs: dict[str, str], progress: Progress) -> dict[str, Any]:
    """What a search would measure, and about how long that takes, from the time of one forward."""
    frame = frame_of(base, config)
    budget = check_budget(frame, config)
    partial = run.partial("search", _measuring(config) | {"inputs": inputs})
    partial.mkdir(parents=True, exist_ok=True)
    measurer = _measurer(run, base, config, frame, partial, inputs, progress, lambda steps, note="": None)
    options = measured_options(frame.shape.channels)
    candidates = sum(not measurer.has_divergence(item, option) for item in frame.items for option in options)
    verified = UNIFORM + 1 + config.rounds
    seconds = measurer.seconds_for_one(frame.uniform(options[0]))
    forwards = 0.6 * candidates * config.windows + verified * measurer.held_out_windows + config.windows
    return {
        "budget_bytes": budget,
        "base_bytes": frame.base_bytes,
        "context": frame.tokens,
        "candidates": candidates,
        "already_measured": len(frame.items) * len(options) - candidates,
        "settings_to_verify": verified,
        "seconds_per_forward": seconds,
        "estimated_seconds": round(forwards * seconds, 1),
    }


def measure_candidates(measurer: Measurer, more: Callable[[], bool]) -> dict[Item, ItemCosts]:
    """Measure option by option in all layers, as long as there may be `more`, and give the costs."""
    items = measurer.frame.items
    spread = [item for start in range(3) for item in items[start::3]]  # so that some of each depth come first
    for option in measured_options(measurer.frame.shape.channels):
        for item in spread:
            if measurer.has_divergence(item, option) or more():
                measurer.divergence(item, option)
    return measurer.costs()


def combine(
    measurer: Measurer, costs: dict[Item, ItemCosts], budget: int, rounds: int, more: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Verify uniform settings and the combination, then bend the costs where that helps; everything verified.

    The first combination and the uniform setting of least predicted KL are always measured.
    """
    frame, results = measurer.frame, []

    def verify(kind: str, label: str, setting: Setting) -> dict[str, Any]:
        verified = measurer.verify(setting)
        predicted = sum(costs[item](option) for item, option in setting.items())
        results.append(line(frame, kind, label, setting, verified, predicted))
        return results[-1]

    uniform = [(sum(cost(option) for cost in costs.values()), option) for option in uniform_settings(frame, budget)]
    for number, (_, option) in enumerate(sorted(uniform)[:UNIFORM]):
        if number == 0 or more() or measurer.is_verified(frame.uniform(option)):
            label = f"rank {option.rank}, {option.bits or 16} bits"
            verify("uniform", label, frame.uniform(option))
    tilt, done = Tilt(), 0
    first = allocate(frame, costs, budget)
    tried, best = {frozenset(first.items())}, verify("search", "first", first)
    while done < rounds:
        before = done
        for name, step in DIRECTIONS:
            bent = tilt.moved(name, step)
            setting = allocate(frame, costs, budget, bent)
            known = frozenset(setting.items()) in tried
            if done >= rounds or known or not (more() or measurer.is_verified(setting)):
                continue
            tried.add(frozenset(setting.items()))
            done += 1
            result = verify("search", f"round {done}: {name} {step:+.1f}", setting)
            if result["kl"] < best["kl"]:
                tilt, best = bent, result
        if done == before:
            break
    return results


def measure_baselines(measurer: Measurer, more: Callable[[], bool]) -> list[dict[str, Any]]:
    """KIVI, as long as there may be `more`."""
    frame, lines = measurer.frame, []
    for bits in KIVI_BITS:
        if measurer.knows_kivi(bits) or more():
            verified = measurer.verify_kivi(bits)
            size = kivi_bytes(frame, bits)
            lines.append(baseline_line(frame, f"KIVI, {bits} bits", size, verified))
    return lines


def _measuring(config: SearchConfig) -> dict[str, Any]:
    """What measurements depend on."""
    names = ("window", "sinks", "group", "windows", "seq_len", "data", "seed", "device", "dtype")
    return {name: getattr(config, name) for name in names}


def _measurer(
    run: Run,
    base: BaseModel,
    config: SearchConfig,
    frame: Frame,
    partial: Path,
    inputs: dict[str, str],
    progress: Progress,
    advance: Any,
) -> Measurer:
    device = pick_device(config.device)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    lengths = dict(samples=windows_needed(config.windows, 0.5), seq_len=config.seq_len)
    asked = DataConfig(data=config.data, **lengths, seed=config.seed + 2, device=config.device)
    ids, _ = kept_windows(run, base, asked, partial / WINDOWS, progress)
    stream = Stream(ids, load_tokenizer(base.folder), 0.5, config.seed)
    settings = _measuring(config) | {"inputs": inputs, "device": device, "dtype": str(dtype)}
    text = json.dumps(settings, sort_keys=True) + hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    identity = hashlib.sha256(text.encode()).hexdigest()
    earlier = run.folder("search") / JOURNAL
    if not (partial / JOURNAL).exists() and read(earlier, identity):
        shutil.copyfile(earlier, partial / JOURNAL)
    return Measurer(
        lambda: Simulator(base, frame, run.folder("calibrate"), dtype, device),
        frame,
        [stream.window(number) for number in range(config.windows)],
        stream.held_out(),
        config.recall,
        Journal(partial / JOURNAL, identity),
        advance,
    )
