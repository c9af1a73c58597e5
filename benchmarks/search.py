"""What a search takes, by the formula of docs/search.md: parts measured here, and a 7B by its floating-point work.

    python -m benchmarks.search --run RUN [--windows 4] [--rounds 8] [--tflops 60]

RUN is calibrated. Times are processor seconds; use OMP_NUM_THREADS=1. `--tflops` is what the GPU of the 7B sustains.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cskv_cli.checkpoint.base import resolve_base
from cskv_cli.config import SearchConfig
from cskv_cli.data.recall import Window
from cskv_cli.run import Run
from cskv_cli.search.options import Option
from cskv_cli.search.simulator import Simulator
from cskv_cli.stages.search import frame_of
from cskv_cli.training.stream import HELD_OUT_RECALL, HELD_OUT_TEXT

HELD_OUT = HELD_OUT_TEXT + HELD_OUT_RECALL
LAYERS_7B, PARAMETERS_7B, HEAD_CHANNELS_7B = 32, 6.74e9, 4096


def seconds(call: Callable[[], object], times: int = 2) -> float:
    """Processor seconds of a call that has run once before."""
    call()
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


def forwards(layers: int, windows: int, rounds: int, share: float, simulation: float, attention: float) -> float:
    """Forwards of one window that a search is worth; three options measured for each of 2 * layers items, 8 asked of
    their attention on 2 windows."""
    items = 2 * layers
    single = 3 * items * windows * share
    return single + (4 + rounds) * HELD_OUT * simulation + windows + HELD_OUT + items * 8 * 2 * attention


def measure(run: Run, config: SearchConfig) -> dict[str, float]:
    """`forward`: seconds of a plain one; all others over it."""
    source = run.manifest("base").config["source"]
    base = resolve_base(source, revision=run.manifest("base").config["revision"], work_dir=run.path / "converted")
    frame = frame_of(base, config)
    simulator = Simulator(base, frame, run.folder("calibrate"), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, simulator.model.config.vocab_size, (config.seq_len,), generator=generator)
    window = Window(ids, 0, torch.ones(len(ids) - 1, dtype=torch.bool))
    plain = simulator.exact(window, hidden=False, attention=False)
    kept = simulator.exact(window, hidden=True, attention=True)
    half, layers = Option(frame.shape.channels // 2), frame.layers
    forward = seconds(lambda: simulator.exact(window, hidden=False, attention=False))
    everything = frame.uniform(half)
    simulation = seconds(lambda: simulator.divergence(everything, window, plain))
    lone = [layers[0], layers[len(layers) // 2], layers[-1]]
    shares = [seconds(lambda i=i: simulator.divergence({(i, "k"): half}, window, kept)) / forward for i in lone]
    attention = seconds(lambda: simulator.output_error((lone[1], "k"), half, window, kept), 4)
    parts = {"simulation": simulation / forward, "share": sum(shares) / 3, "attention": attention / forward}
    return {"layers": len(layers), "forward": forward, **parts}


def axes_seconds(channels: int) -> float:
    """Of the principal axes of one item."""
    square = torch.randn(channels, channels, dtype=torch.float64)
    return seconds(lambda: torch.linalg.eigh(square @ square.T), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--tflops", type=float, default=60.0)
    options = parser.parse_args()
    config = SearchConfig(budget=0.9, windows=options.windows, rounds=options.rounds, seq_len=options.seq_len)
    parts = measure(Run(options.run), config)
    ratios = parts["share"], parts["simulation"], parts["attention"]
    count = forwards(parts["layers"], config.windows, config.rounds, *ratios)
    large = forwards(LAYERS_7B, config.windows, config.rounds, *ratios)
    forward = 2 * PARAMETERS_7B * config.seq_len / (options.tflops * 1e12)
    axes = axes_seconds(HEAD_CHANNELS_7B // 4)
    report = {
        "measured": parts,
        "here": {"forwards": count, "minutes": count * parts["forward"] / 60},
        "7B": {
            "forwards": large,
            "seconds": large * forward,
            "axes_seconds, 1024 key channels": 2 * LAYERS_7B * axes,
            "axes_seconds, 4096 key channels": 2 * LAYERS_7B * axes * 64,
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
