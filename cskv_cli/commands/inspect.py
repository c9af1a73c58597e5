"""`cskv inspect`."""

from typing import Any

from cskv_cli.console import Console
from cskv_cli.layout import bits_span, span
from cskv_cli.options import DEFAULT_CHECKPOINT, CheckpointArgument, RevisionOption, verb


@verb()
def inspect(
    console: Console, checkpoint: CheckpointArgument = DEFAULT_CHECKPOINT, revision: RevisionOption = None
) -> None:
    """Show what a checkpoint is: ranks, bits, window, bytes per token, and how many tokens fit in memory."""
    from cskv_cli.checkpoint.load import find_checkpoint
    from cskv_cli.stages.inspect import inspect as look

    result = look(find_checkpoint(checkpoint, revision))
    console.table(checkpoint, ("", ""), _rows(result), texts=2)
    console.line()
    console.table(
        "Tokens that fit beside the weights",
        ("memory", "base", "CSKV"),
        [(size, f"{fit['base']:,}", f"{fit['cskv']:,}") for size, fit in result["tokens_that_fit"].items()],
    )
    paper = result["paper_example"]
    console.line()
    console.line(
        f"A cache like this for {paper['model']} at {paper['tokens']:,} tokens: "
        f"{paper['base_bytes'] / 1e9:.0f} GB -> {paper['cskv_bytes'] / 1e9:.1f} GB"
    )
    console.result({"checkpoint": checkpoint, **result})


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    size = result["cache_bytes_per_token"]
    bits = "as the model's"
    if result["group"] is not None:
        keys, values = (bits_span(result[f"bits_{x}"], result[f"rank_{x}"]) for x in "kv")
        bits = f"{keys} for keys, {values} for values, groups of {result['group']}"
    shared = "" if result["head_groups"] == 1 else f", in {result['head_groups']} head groups"
    return [
        ("model", f"{result['model_type']}, {result['weight_bytes'] / 1e9:.2f} GB of weights in {result['dtype']}"),
        ("compressed layers", f"{result['compressed_layers']} of {result['layers']}"),
        ("latent channels", f"{span(result['rank_k'])} for keys, {span(result['rank_v'])} for values{shared}"),
        ("of channels", str(result["channels"])),
        ("bits", bits),
        ("exact tokens", f"last {result['window']}, first {result['sinks']}"),
        ("cache bytes per token", f"{size['base']:,} -> {size['cskv']:,.0f} ({size['cskv'] / size['base']:.1%})"),
    ]
