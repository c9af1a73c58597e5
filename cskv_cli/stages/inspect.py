"""`cskv inspect`: what a checkpoint is, and how far its cache reaches."""

import json
from pathlib import Path
from typing import Any

import torch

from cskv_cli.checkpoint.weights import read_headers
from cskv_cli.gates import COMPRESSION_TOKENS
from cskv_cli.layout import Layout, parse_layout
from cskv_cli.memory import Shape, base_bytes, bytes_per_token, cache_bytes
from cskv_cli.stages.export import base_shape

MEMORIES = (1, 8, 24, 80)  # GB
PAPER_TOKENS = 200_000
PAPER_LAYERS = 32
PAPER_SHAPE = Shape(channels=4096, dtype_bytes=2)  # LLaMA-2-7B in 16 bits


def inspect(folder: Path) -> dict[str, Any]:
    """Layout, bytes of weights and cache, the tokens that fit beside the weights, and the paper's example.

    Tokens are those of one sequence; memory for activations is not counted. Layers left as they are (their window
    bounds their cache) are not counted either.
    """
    config, layout, shape = _described(folder)
    headers = [header for tensors in read_headers(folder).values() for header in tensors.values()]
    weights = sum(header.end - header.start for header in headers)
    return {
        "model_type": config["model_type"],
        "layers": len(layout.rank_k),
        "compressed_layers": len(layout.layers),
        "channels": shape.channels,
        **layout.model_dump(mode="json", exclude={"version"}),
        "dtype": _dtype(config),
        "weight_bytes": weights,
        "cache_bytes_per_token": {"base": base_bytes(shape, layout, 1), "cskv": bytes_per_token(shape, layout)},
        "tokens_that_fit": {f"{size} GB": reach(shape, layout, size * 10**9 - weights) for size in MEMORIES},
        "paper_example": _paper_example(shape, layout),
    }


def compression(folder: Path, tokens: int = COMPRESSION_TOKENS) -> float:
    """Share of the bytes of the cache that is gone after `tokens` tokens, in the layers that are compressed."""
    _, layout, shape = _described(folder)
    return 1 - cache_bytes(shape, layout, tokens) / base_bytes(shape, layout, tokens)


def _described(folder: Path) -> tuple[dict[str, Any], Layout, Shape]:
    config = json.loads((folder / "config.json").read_text())
    layout = parse_layout(config["cskv"], folder / "config.json")
    return config, layout, base_shape(folder, getattr(torch, _dtype(config)))


def _dtype(config: dict[str, Any]) -> str:
    return config.get("dtype") or config["torch_dtype"]


def reach(shape: Shape, layout: Layout, room: float) -> dict[str, int]:
    """Most tokens whose cache takes at most `room` bytes, in whole groups."""
    base = max(int(room // base_bytes(shape, layout, 1)), 0)
    low, high, step = 0, max(int(room), 0), layout.group or 1
    while low < high:  # cache_bytes grows with every group
        middle = (low + high + 1) // 2
        fits = cache_bytes(shape, layout, middle * step) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return {"base": base, "cskv": low * step}


def _paper_example(shape: Shape, layout: Layout) -> dict[str, Any]:
    """LLaMA-2-7B with a cache of the same shares of channels and the same bits, 200K tokens (paper, section 1)."""
    mean = lambda values: sum(v for v in values if v is not None) / len(layout.layers)  # noqa: E731
    spread = lambda value: (value,) * PAPER_LAYERS  # noqa: E731
    first = layout.layers[0]
    alike = layout.model_copy(
        update={f"rank_{x}": spread(round(mean(getattr(layout, f"rank_{x}")) / shape.channels * 4096)) for x in "kv"}
        | {f"bits_{x}": spread(getattr(layout, f"bits_{x}")[first]) for x in "kv"}
        | {"whole": ()}
    )
    return {
        "model": "LLaMA-2-7B",
        "tokens": PAPER_TOKENS,
        "base_bytes": base_bytes(PAPER_SHAPE, alike, PAPER_TOKENS),
        "cskv_bytes": cache_bytes(PAPER_SHAPE, alike, PAPER_TOKENS),
    }
