"""What a step of training takes: its time, and the peak memory of a process that does nothing else.

    python -m benchmarks.finetune [MODEL_FOLDER ...] [--seq-len 512] [--steps 3] [--dtype bfloat16] [--device cuda]

Each model (by default a randomly initialized Llama of 1.1 billion parameters; `--shape 7b` makes one of LongChat-7B's
shape) at ratio 0.8, by both objectives and, for distill, with activations computed anew, each in its own process.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.calibrate import LLAMA_1B, in_child, make_model, peak_mb

LLAMA_7B = dict(
    hidden_size=4096,
    num_hidden_layers=32,
    intermediate_size=11008,
    vocab_size=32000,
    num_attention_heads=32,
    num_key_value_heads=32,
)
WAYS = {"reconstruction": ("reconstruction", False), "distill": ("distill", False), "checkpointing": ("distill", True)}


def measure(folder: str, way: str, seq_len: int, steps: int, dtype: str, device: str) -> dict:
    """Seconds of each step but the first, and the peak memory of the process or of the device, in MB."""
    import torch

    from cskv_cli.checkpoint.base import BaseModel
    from cskv_cli.stages.finetune import checkpoint_activations
    from cskv_cli.training.objectives import OBJECTIVES
    from cskv_cli.training.optimizer import make_optimizer
    from cskv_cli.training.stream import text_window
    from cskv_cli.training.student import load_student, trained

    base = BaseModel(folder, "folder", None, Path(folder))
    with tempfile.TemporaryDirectory() as factors:
        layout = random_factors(base, Path(factors))
        idle = peak_mb()
        model = load_student(base, layout, Path(factors), getattr(torch, dtype), device)
    objective, checkpointing = WAYS[way]
    if checkpointing:
        checkpoint_activations(model)
    optimizer, loss = make_optimizer(trained(model), objective, None), OBJECTIVES[objective](model)
    window = text_window(torch.randint(3, model.config.vocab_size, (seq_len,)))
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        loss.backward(window, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak_mb() - idle
    return {"seconds": seconds[1:], "peak_mb": peak}


def random_factors(base, folder: Path):  # noqa: ANN201
    """Random factors at ratio 0.8 of every layer, and their layout."""
    import torch

    from cskv_cli import factors
    from cskv_cli.layout import unquantized

    config = base.config
    channels = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    rank, layers = round(0.2 * channels), config["num_hidden_layers"]
    for i in range(layers):
        a, b = torch.randn(config["hidden_size"], rank) / 50, torch.randn(rank, channels) / 50
        factors.save_layer(folder, i, {"k.a": a, "k.b": b, "v.a": a.clone(), "v.b": b.clone()})
    return unquantized(32, 4, (rank,) * layers, (rank,) * layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--shape", choices=["1b", "7b"], default="1b")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print("| model | objective | s per step | tokens/s | peak memory, MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        if not options.models:
            shape = {"1b": LLAMA_1B, "7b": LLAMA_7B}[options.shape]
            in_child(make_model, f"{folder}/random-{options.shape}", shape)
        for model in options.models or [f"{folder}/random-{options.shape}"]:
            name = json.loads((Path(model) / "config.json").read_text())["hidden_size"]
            for way in WAYS:
                result = in_child(measure, model, way, options.seq_len, options.steps, options.dtype, options.device)
                step = sorted(result["seconds"])[len(result["seconds"]) // 2]
                row = f"{step:.2f} | {options.seq_len / step:,.0f} | {result['peak_mb']:,.0f}"
                print(f"| {Path(model).name} (hidden {name}) | {way} | {row} |", flush=True)


if __name__ == "__main__":
    main()
