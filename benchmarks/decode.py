"""What a decode step costs with each checkpoint's cache and with the base's: time, peak memory, bytes of the cache.

    python -m benchmarks.decode CHECKPOINT... [--prompt 4096] [--new 256] [--dtype float32 bfloat16] [--json]

Time: all caches read the same random prompt in one process, then take turns, a token at a time; the first checkpoint's
weights serve the base with a `DynamicCache`. Memory: a process for each cache does the same alone; its peak is told
for the whole and, where Linux lets it be set back, for the decoding alone.
"""

import argparse
import ctypes
import json
import statistics
import time
from pathlib import Path

from benchmarks.calibrate import in_child, peak_mb

BASE = "base"


# Nothing big is imported outside of the functions: a child's peak begins at its parent's memory.
def load(checkpoint, dtype):
    import torch

    from cskv_cli.checkpoint.load import find_checkpoint, load_checkpoint

    torch.manual_seed(0)
    return load_checkpoint(find_checkpoint(checkpoint), "cpu", dtype)


def new_cache(model, variant):
    from transformers import DynamicCache

    from cskv_cli.modeling.cskv_cache import CSKVCache

    return DynamicCache(config=model.config) if variant == BASE else CSKVCache(model.config)


def read(model, cache, ids):
    """Give the cache tokens [1, new]; the next one, [1, 1]."""
    import torch

    from cskv_cli.modeling.modeling_cskv import CACHE

    with torch.inference_mode():
        return model(ids, logits_to_keep=1, **{CACHE: cache}).logits.argmax(-1)


def random_prompt(model, length):
    import torch

    return torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def held_bytes(cache):
    """Bytes of all tensors that can be reached from a cache; a view counts with all that it is a view of."""
    import torch

    storages, seen, rest = {}, set(), [cache]
    while rest:
        thing = rest.pop()
        if id(thing) in seen or isinstance(thing, type | torch.nn.Module):
            continue
        seen.add(id(thing))
        if torch.is_tensor(thing):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple | set):
            rest += thing
        else:
            rest += (thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})).values()
    return sum(storages.values())


def measure_time(checkpoints, dtype, prompt, new):
    """Milliseconds of each step, by variant."""
    models = {checkpoint: load(checkpoint, dtype) for checkpoint in checkpoints}
    models = {BASE: models[checkpoints[0]], **models}
    caches = {name: new_cache(model, name) for name, model in models.items()}
    ids = random_prompt(models[BASE], prompt)
    tokens = {name: read(model, caches[name], ids) for name, model in models.items()}
    times = {name: [] for name in models}
    for _ in range(new):
        for name, model in models.items():
            began = time.perf_counter()
            tokens[name] = read(model, caches[name], tokens[name])
            times[name].append(1000 * (time.perf_counter() - began))
    return times


def measure_memory(checkpoint, variant, dtype, prompt, new):
    """Megabytes of the process at its peaks, and bytes of the cache at the end."""
    model = load(checkpoint, dtype)
    cache = new_cache(model, variant)
    loaded = peak_mb()
    token = read(model, cache, random_prompt(model, prompt))
    whole = peak_mb()
    before = forget_peak()
    for _ in range(new):
        token = read(model, cache, token)
    decoding = status_mb("VmHWM") if before else None
    report = {"loaded": loaded, "peak": max(whole, peak_mb()), "before_decoding": before, "decoding": decoding}
    return {**report, "cache_bytes": held_bytes(cache)}


def forget_peak():
    """Give freed memory back and set back the peak that Linux keeps; what is held now in MB, None on other systems."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return None
    return status_mb("VmRSS")


def status_mb(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def measure(options, dtype):
    """A row for each variant."""
    sizes = options.prompt, options.new
    times = in_child(measure_time, options.checkpoint, dtype, *sizes)
    rows = []
    for name, each in times.items():
        steps = [ours / base for ours, base in zip(each, times[BASE], strict=True)]
        checkpoint = options.checkpoint[0] if name == BASE else name
        row = {"cache": name, "ms_per_token": statistics.median(each), "ratio_to_base": statistics.median(steps)}
        rows.append(row | in_child(measure_memory, checkpoint, name, dtype, *sizes))
    return rows


def table(report):
    lines = [f"{report['new']} tokens after a prompt of {report['prompt']}, {report['threads']} threads"]
    for dtype, rows in report["dtype"].items():
        lines.append(f"{dtype:28} ms/token  /base  peak MB  decoding MB  cache MB")
        for row in rows:
            decoding = "" if row["decoding"] is None else f"{row['before_decoding']:.0f}-{row['decoding']:.0f}"
            lines.append(
                f"  {row['cache'][-26:]:26} {row['ms_per_token']:8.1f} {row['ratio_to_base']:6.2f} {row['peak']:8.0f} "
                f"{decoding:>12} {row['cache_bytes'] / 2**20:9.1f}"
            )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="+", help="folder or Hub id of an export; all of one base model")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens before the first step")
    parser.add_argument("--new", type=int, default=256, help="steps")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = {"prompt": options.prompt, "new": options.new, "threads": in_child(threads)}
    report["dtype"] = {dtype: measure(options, dtype) for dtype in options.dtype}
    print(json.dumps(report, indent=2) if options.json else table(report))


def threads():
    import torch

    return torch.get_num_threads()


if __name__ == "__main__":
    main()
