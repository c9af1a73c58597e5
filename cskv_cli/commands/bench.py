"""`cskv bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cskv_cli.console import Console
from cskv_cli.errors import CskvError
from cskv_cli.eval_config import BenchConfig
from cskv_cli.options import DEFAULT_CHECKPOINT, CheckpointArgument, RevisionOption, Settings, verb

PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw decoding times into this PNG.")]
HEADER = "cache", "prefill s", "/ base", "decode ms", "range", "/ base", "limit ms", "/ base", "reached", "tokens/s"
HEADER += "cache MB", "formula", "decode MB"


@verb(bench=BenchConfig)
def bench(
    settings: Settings,
    console: Console,
    checkpoint: CheckpointArgument = DEFAULT_CHECKPOINT,
    revision: RevisionOption = None,
    plot: PlotOption = None,
) -> None:
    """Time and memory of decoding, beside the base model's caches, all in turns in one run."""
    config = BenchConfig(**settings["bench"])
    if plot is not None and not plot.parent.is_dir():
        raise CskvError(f"there is no folder {plot.parent} for the plot", "make it, or give another --plot")
    from cskv_cli.checkpoint.load import find_checkpoint
    from cskv_cli.stages.bench import bench as run

    result = run(find_checkpoint(checkpoint, revision), config, console.progress)
    if plot is not None:
        from cskv_cli.plots import plot_decoding

        plot_decoding(plot, result["rows"])
    where = f"{result['device']}, {result['threads']} threads, {result['dtype']}"
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in result["rows"]):
        rows = [_row(row) for row in result["rows"] if (row["context"], row["batch"]) == (context, batch)]
        console.table(f"{context:,} tokens, batch {batch} ({where})", HEADER, rows)
        console.line()
    for name, reason in result["skipped"].items():
        console.line(f"{name}: left out, {reason}")
    for batch, fit in result["longest"].items():
        tokens = f"{fit['base']:,} tokens with the base's cache, {fit['cskv']:,} with CSKV's"
        console.line(f"beside the weights in {config.memory}, batch {batch}, by formula: {tokens}")
    speed = result["machine"]
    console.line(
        f"limit: what a step must cost at {speed['operations_per_second'] / 1e9:,.0f} GFLOP/s and "
        f"{speed['bytes_per_second'] / 1e9:,.1f} GB/s, as just measured; see docs/performance.md"
    )
    console.line("Times are medians; where the range is wide, other work on this machine disturbed them.")
    console.result(result)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    prefill, decode, size, memory, limit = (
        row[name] for name in ("prefill_seconds", "decode_seconds", "cache_bytes", "memory", "limit")
    )
    megabytes = lambda count: "" if count is None else f"{count / 1e6:.1f}"  # noqa: E731
    return (
        row["cache"],
        f"{prefill['median']:.2f}",
        f"{prefill['to_base']:.2f}",
        f"{1000 * decode['median']:.1f}",
        f"{1000 * decode['least']:.1f}-{1000 * decode['greatest']:.1f}",
        f"{decode['to_base']:.2f}",
        f"{1000 * limit['seconds']:.1f}" if limit else "",
        f"{limit['to_base']:.2f}" if limit else "",
        f"{limit['reached']:.0%}" if limit else "",
        f"{row['tokens_per_second']:.1f}",
        megabytes(size["held"]),
        megabytes(size["formula"]),
        megabytes(memory and memory["decode"] - memory["idle"]),
    )
