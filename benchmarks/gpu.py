"""Decoding with models of 7B shape on one GPU: time and largest batch, against the base's caches, in --minutes.

    python -m benchmarks.gpu [--minutes 8] [--context 32768] [--out gpu.json]

A random Llama of LongChat-7B's shape (32 KV heads), and one with 8 KV heads; ratio 0.8, in 16 bits and in 4, by torch
and by the Triton kernels. Caches are filled with random keys, values and latents through their own `update`, since a
prefill of 32k tokens would take most of the time and is the base's own. Each row is printed and written to --out as
soon as it is there; a part that would not fit in the time left is skipped, and said to be.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import Cache, DynamicCache, LlamaConfig, StaticCache

from benchmarks.finetune import LLAMA_7B
from cskv_cli.config import parse_size
from cskv_cli.costs import Dims, Machine, base_step, cskv_step, dims_of, measure_machine, now
from cskv_cli.evaluation.held import reachable_bytes
from cskv_cli.layout import Layout, unquantized
from cskv_cli.memory import Shape, base_bytes, cache_bytes
from cskv_cli.modeling import cskv_decode, cskv_triton
from cskv_cli.modeling.cskv_factors import up_projection
from cskv_cli.modeling.modeling_cskv import CACHE, CSKVCache, CSKVLlamaForCausalLM

SHAPES = {
    "mha": LLAMA_7B,
    "gqa": LLAMA_7B | {"num_key_value_heads": 8},
    "tiny": dict(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        vocab_size=97,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
}
RATIO, WINDOW, SINKS, GROUP, HEAD_GROUPS, WARM_UP = 0.8, 32, 4, 32, 4, 3
COLUMNS = "model", "cache", "attention", "path", "bits", "head groups", "batch", "ms", "range", "tokens/s", "cache GB"
COLUMNS += "limit ms", "reached"


@dataclass(frozen=True)
class Way:
    """One way to decode; `kernel`: by Triton, where it is CSKV's."""

    cache: str
    attention: str = "sdpa"
    bits: int = 16
    kernel: bool = False
    groups: int = 1

    @property
    def path(self) -> str:
        return "" if self.cache != "cskv" else "triton" if self.kernel else "torch"


def ways(kernels: bool) -> list[Way]:
    """The most telling first. The last ones are those for which the largest batch is looked for."""
    ours = [Way("cskv", bits=bits, kernel=kernel) for bits in (16, 4) for kernel in (kernels, False)]
    grouped = [Way("cskv", bits=bits, kernel=kernels, groups=HEAD_GROUPS) for bits in (16, 4)]
    flash = [Way("dynamic", "flash_attention_2")] if find_spec("flash_attn") else []
    return list(dict.fromkeys([Way("dynamic"), *ours, Way("static"), *grouped, *flash]))


def layout_for(shape: dict, way: Way) -> Layout:
    channels = shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
    rank, layers = round((1 - RATIO) * channels / way.groups) * way.groups, shape["num_hidden_layers"]
    layout = unquantized(WINDOW, SINKS, (rank,) * layers, (rank,) * layers)
    bits = None if way.bits == 16 else way.bits
    lists = {f"bits_{x}": (bits,) * layers for x in "kv"} | {f"clip_{x}": (1.0,) * layers for x in "kv"}
    return layout.model_copy(update=lists | {"group": GROUP, "head_groups": way.groups})


class Subject:
    """A random model of one shape."""

    def __init__(self, name: str, context: int, device: str, dtype: torch.dtype) -> None:
        self.name, self.context, self.device = name, context, torch.device(device)
        config = LlamaConfig(**SHAPES[name], max_position_embeddings=2 * context, dtype=dtype)
        self.way, config.cskv = Way("cskv"), layout_for(SHAPES[name], Way("cskv")).model_dump(mode="json")
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with self.device:
                self.model = CSKVLlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        attention = self.model.model.layers[0].self_attn
        self.states = 1, config.num_key_value_heads, context, attention.head_dim
        self.shape = Shape(config.num_key_value_heads * attention.head_dim, dtype.itemsize)

    def take(self, way: Way) -> None:
        """Get ready to decode that way: factors, bits, attention function, kernels."""
        layout, model = layout_for(SHAPES[self.name], way), self.model
        if way.groups != self.way.groups:
            for layer in model.model.layers:
                attention, hidden = layer.self_attn, model.config.hidden_size
                for x in "kv":
                    rank = getattr(layout, f"rank_{x}")[0]
                    down = torch.nn.Linear(hidden, rank, bias=False)
                    up = up_projection(rank, self.shape.channels, way.groups, bias=False)
                    for part, module in (("down", down), ("up", up)):
                        setattr(attention, f"{x}_{part}", module.to(self.device, model.dtype))
        model.config.cskv, self.way = layout.model_dump(mode="json"), way
        model.set_attn_implementation(way.attention)
        for layer in model.model.layers:
            vars(layer.self_attn).pop("known_calls", None)
        cskv_decode.usable = cskv_triton.usable if way.kernel else lambda tensor: False

    def filled(self, batch: int) -> Cache:
        """A cache that holds `context` random tokens, the same in each row."""
        free()
        model, dtype = self.model, self.model.dtype
        keys, values = (torch.randn(self.states, device=self.device, dtype=dtype) for _ in range(2))
        if self.way.cache == "cskv":
            cache = CSKVCache(model.config)
            positions = torch.arange(self.context, device=self.device)[None]
            place = {"position_ids": positions, "position_embeddings": model.model.rotary_emb(keys, positions)}
            hidden = torch.randn(1, self.context, model.config.hidden_size, device=self.device, dtype=dtype)
            cache.begin(model.model, None)
            for layer, held in zip(model.model.layers, cache.layers, strict=True):
                held.stage(layer.self_attn, hidden, place)
                held.update(keys, values)
            cache.end()
        else:
            if self.way.cache == "static":
                cache = StaticCache(config=model.config, max_cache_len=self.context + 64)
            else:
                cache = DynamicCache(config=model.config)
            for i in range(len(model.model.layers)):
                cache.update(keys, values, i)
        del keys, values
        if batch > 1:
            cache.batch_repeat_interleave(batch)
        return cache

    def decode(self, cache: Cache, batch: int, steps: int) -> list[float]:
        """Seconds of each step."""
        ids, seconds = torch.ones(batch, 1, dtype=torch.long, device=self.device), []
        for _ in range(steps):
            began = now()
            self.model(ids, **{CACHE: cache})
            seconds.append(now() - began)
        return seconds

    @property
    def bytes_per_sequence(self) -> int:
        count = cache_bytes if self.way.cache == "cskv" else base_bytes
        return count(self.shape, layout_for(SHAPES[self.name], self.way), self.context)


@torch.inference_mode()
def measure(subject: Subject, batch: int, steps: int, machine: Machine, dims: Dims) -> dict:
    """A row of the table."""
    way, layout = subject.way, layout_for(SHAPES[subject.name], subject.way)
    cache = subject.filled(batch)
    held = reachable_bytes(cache)
    seconds = subject.decode(cache, batch, WARM_UP + steps)[WARM_UP:]
    cost = (cskv_step if way.cache == "cskv" else base_step)(dims, layout, subject.context, batch)
    middle = statistics.median(seconds)
    return {
        "model": subject.name,
        **asdict(way),
        "path": way.path,
        "batch": batch,
        "context": subject.context,
        "seconds": {"median": middle, "least": min(seconds), "greatest": max(seconds)},
        "tokens_per_second": batch / middle,
        "cache_bytes": held,
        "limit": {"seconds": cost.seconds(machine), "multiply_adds": cost.multiply_adds, "bytes": cost.bytes},
        "reached": cost.seconds(machine) / middle,
    }


@torch.inference_mode()
def fits(subject: Subject, batch: int, memory: int | None) -> bool:
    """Whether a step can be made with so many sequences; `memory` stands for a GPU's where there is none."""
    try:
        cache = subject.filled(batch)
        subject.decode(cache, batch, 2)
    except torch.OutOfMemoryError:
        return False
    if memory is None:
        return True
    weights = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    return weights + reachable_bytes(cache) <= memory


def largest(fit: Callable[[int], bool], guess: int, time_left: Callable[[], bool]) -> int:
    """The largest batch that fits, within 3 %; less if time runs out."""
    low, high, tried = 0, None, max(guess, 1)
    while time_left() and (high is None or high - low > max(1, low // 32)):
        if fit(tried):
            low = tried
        else:
            high = tried
        tried = low + max(low // 8, 1) if high is None else (low + high) // 2
    return low


def free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Report:
    """Prints rows as they come, and keeps them in a file."""

    def __init__(self, path: Path | None, head: dict) -> None:
        self.path, self.content = path, head | {"rows": [], "largest_batch": [], "skipped": []}
        print(f"{head['device']}, {head['dtype']}, {head['context']:,} tokens of context")
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)

    def row(self, row: dict) -> None:
        s = row["seconds"]
        cells = [row["model"], row["cache"], row["attention"], row["path"], row["bits"], row["groups"], row["batch"]]
        cells += [f"{1000 * s['median']:.1f}", f"{1000 * s['least']:.1f} to {1000 * s['greatest']:.1f}"]
        cells += [f"{row['tokens_per_second']:.1f}", f"{row['cache_bytes'] / 1e9:.2f}"]
        cells += [f"{1000 * row['limit']['seconds']:.2f}", f"{row['reached']:.0%}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        self._keep("rows", row)

    def batch(self, name: str, way: Way, batch: int) -> None:
        print(f"largest batch, {name}, {way.cache} {way.bits} bits: {batch}", flush=True)
        self._keep("largest_batch", {"model": name, **asdict(way), "batch": batch})

    def skip(self, what: str, why: str) -> None:
        print(f"skipped: {what}: {why}", flush=True)
        self._keep("skipped", {"what": what, "why": why})

    def _keep(self, kind: str, entry: dict) -> None:
        self.content[kind].append(entry)
        if self.path is not None:
            self.path.write_text(json.dumps(self.content, indent=1))


def run(options: argparse.Namespace, report: Report, machine: Machine, deadline: float) -> None:
    """Every part, each only if as much time is left as the longest so far took."""
    longest, names = 0.0, options.shapes.split(",")
    for number, name in enumerate(names):
        end = time.monotonic() + (deadline - time.monotonic()) / (len(names) - number)  # an equal share for each
        subject = Subject(name, options.context, options.device, getattr(torch, options.dtype))
        dims = dims_of(subject.model, subject.shape)
        kernels = options.device == "cuda" and cskv_triton.triton is not None
        todo = [(way, 1) for way in ways(kernels)]
        todo += [(replace(way, kernel=kernels), 0) for way in (Way("cskv", bits=4), Way("cskv"), Way("dynamic"))]
        for way, batch in todo:
            what = f"{name}, {way.cache} {way.bits} bits {way.path}" + ("" if batch else ", largest batch")
            if time.monotonic() + longest > end:
                report.skip(what, "no time left")
                continue
            began = time.monotonic()
            try:
                subject.take(way)
                if not batch:
                    batch = _largest(subject, options, end)
                    report.batch(name, way, batch)
                if batch:
                    report.row(measure(subject, batch, options.new_tokens, machine, dims))
            except (torch.OutOfMemoryError, RuntimeError, ImportError, ValueError) as error:
                report.skip(what, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            longest = max(longest, time.monotonic() - began)
        del subject
        free()


def _largest(subject: Subject, options: argparse.Namespace, end: float) -> int:
    memory = None if options.device == "cuda" else parse_size(options.memory)
    room = torch.cuda.mem_get_info()[0] if memory is None else memory
    guess = int(0.85 * room / subject.bytes_per_sequence)
    return largest(lambda batch: fits(subject, batch, memory), guess, lambda: time.monotonic() < end - 20)


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="mha,gqa", help=", ".join(SHAPES))
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory", default="1GB", help="for the largest batch where there is no GPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    machine = measure_machine(options.device, getattr(torch, options.dtype))
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    head = {"device": name, "dtype": options.dtype, "context": options.context, "machine": asdict(machine)}
    report = Report(options.out, head)
    if options.device != "cuda":
        report.skip("the Triton kernels", "they need a CUDA device")
    try:
        run(options, report, machine, deadline)
    finally:
        cskv_decode.usable = cskv_triton.usable
    refused = [str(kind) for kind, trusted in cskv_triton._trusted.items() if not trusted]
    for kind in refused:
        report.skip(f"Triton kernel for {kind}", "it failed, or differed from torch: rows of path triton are torch's")
    return report.content


if __name__ == "__main__":
    main()
