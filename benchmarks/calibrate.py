"""What calibration costs: its time beside plain forward passes over the same tokens, and its peak memory.

    python benchmarks/calibrate.py [--model FOLDER] [--json]

Speed: whole calibrations against the same layer-by-layer passes without statistics, and against the model all in
memory, in turns. Memory: peak of a process that calibrates a randomly initialized Llama of 1.1 billion parameters.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path

LLAMA_1B = dict(
    hidden_size=2048,
    num_hidden_layers=16,
    intermediate_size=8192,
    vocab_size=32000,
    num_attention_heads=32,
    num_key_value_heads=8,
)
LLAMA_SMALL = LLAMA_1B | dict(
    hidden_size=1024, num_hidden_layers=4, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4
)
WAYS = ("in memory", "layer by layer", "calibrate")


# Nothing big is imported outside of the functions: a child's peak begins at its parent's memory.
def make_model(folder, config):
    """Save a randomly initialized Llama in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)


def calibrate(folder, ids, run_folder, dtype):
    """The whole stage, from loading the model to the finished folder."""
    from cskv_cli.checkpoint.base import BaseModel
    from cskv_cli.config import CalibrateConfig
    from cskv_cli.data.windows import Windows
    from cskv_cli.progress import SILENT
    from cskv_cli.run import Run
    from cskv_cli.stages.calibrate import calibrate as stage

    base = BaseModel(str(folder), "folder", None, Path(folder))
    config = CalibrateConfig(device="cpu", dtype=dtype)
    stage(Run(Path(run_folder)), base, config, {}, Windows(ids, {"random": len(ids)}, ()), SILENT)


def in_child(function, *arguments):
    """Run `function(*arguments)` in a process of its own and return what it sends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def _send(sender, function, arguments):
    sender.send(function(*arguments))


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(folder, samples, seq_len):
    """Peak memory of calibrating the model in `folder`, in MB, and what it is held against."""
    import torch
    import transformers  # noqa: F401

    from cskv_cli.stages import calibrate as _  # noqa: F401

    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2**20
    ids = torch.randint(3, LLAMA_1B["vocab_size"], (samples, seq_len))
    hidden = ids.numel() * LLAMA_1B["hidden_size"] * 2 / 2**20
    idle = peak_mb()
    with tempfile.TemporaryDirectory() as run_folder:
        calibrate(folder, ids, run_folder, "auto")
    return {"model": size, "hidden": hidden, "limit": size / 2 + hidden, "idle": idle, "peak": peak_mb()}


def measure_speed(folder, samples, seq_len, dtype, rounds):
    """Seconds of each way, round by round: on the clock, and of processor time (which other processes disturb less)."""
    import torch
    from transformers import AutoModelForCausalLM

    from cskv_cli.checkpoint.layers import BATCH_TOKENS, LayerByLayer, load_by_layer

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.randint(3, whole.config.vocab_size, (samples, seq_len))

    @torch.no_grad()
    def in_memory():
        for batch in ids.split(max(1, BATCH_TOKENS // seq_len)):
            whole.model(batch, use_cache=False)

    def plain(offload):
        model = load_by_layer(Path(folder), Path(offload), dtype=whole.dtype, device="cpu")
        states = LayerByLayer(model, ids, "cpu")
        for index in range(len(states.layers)):
            states.push(index)

    seconds = {clock: {name: [] for name in WAYS} for clock in ("wall", "cpu")}
    in_memory()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as offload, tempfile.TemporaryDirectory() as run_folder:
            ways = (in_memory, lambda o=offload: plain(o), lambda r=run_folder: calibrate(folder, ids, r, dtype))
            for name, way in zip(WAYS, ways, strict=True):
                wall, cpu = time.perf_counter(), time.process_time()
                way()
                seconds["wall"][name].append(time.perf_counter() - wall)
                seconds["cpu"][name].append(time.process_time() - cpu)
    return {"tokens": ids.numel(), "dtype": dtype, "seconds": seconds}


def ratios(seconds, name):
    """Calibration's time over that of another way: round by round, and the best of each (for a busy machine)."""
    each = [ours / other for ours, other in zip(seconds["calibrate"], seconds[name], strict=True)]
    best = min(seconds["calibrate"]) / min(seconds[name])
    return {"best": best, "median": statistics.median(each), "least": min(each), "greatest": max(each)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model to time; a random one by default")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        if not options.skip_memory:
            in_child(make_model, f"{folder}/1b", LLAMA_1B)
            report["memory_mb"] = in_child(measure_memory, f"{folder}/1b", 2, options.seq_len)
        if not options.model:
            in_child(make_model, f"{folder}/small", LLAMA_SMALL)
        model = options.model or f"{folder}/small"
        sizes = options.samples, options.seq_len
        report["speed"] = [in_child(measure_speed, model, *sizes, dtype, options.rounds) for dtype in options.dtype]
    for speed in report["speed"]:
        speed["ratio"] = {
            clock: {name: ratios(seconds, name) for name in WAYS[:2]} for clock, seconds in speed["seconds"].items()
        }
    print(json.dumps(report, indent=2) if options.json else table(report))


def table(report):
    lines = []
    for speed in report["speed"]:
        for clock, seconds in speed["seconds"].items():
            lines.append(f"{speed['tokens']} tokens, {speed['dtype']}, {clock} time")
            lines += [f"  {name:26} {statistics.median(each):7.2f} s" for name, each in seconds.items()]
            for name, ratio in speed["ratio"][clock].items():
                figures = ", ".join(f"{key} {value:.2f}" for key, value in ratio.items())
                lines.append(f"  calibrate / {name:14} {figures}")
    if memory := report.get("memory_mb"):
        lines += ["peak memory, MB", *(f"  {name:15} {value:8.0f}" for name, value in memory.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
