"""`cskv eval`: what the smaller cache costs."""

from pathlib import Path
from typing import Any

from cskv_cli.checkpoint.load import layout_of, load_checkpoint, load_tokenizer, shape_of
from cskv_cli.config import EvalConfig
from cskv_cli.data.sources import parse_source
from cskv_cli.data.windows import Windows, evaluation_windows
from cskv_cli.devices import pick_device
from cskv_cli.evaluation.perplexity import compare
from cskv_cli.memory import base_bytes, bytes_per_token
from cskv_cli.progress import Progress

DEFAULT_DATA = ("builtin",)


def evaluation_text(folder: Path, config: EvalConfig) -> Windows:
    """The windows to score, consecutive from the start of the text."""
    sources = [parse_source(text) for text in config.data or DEFAULT_DATA]
    tokenizer = load_tokenizer(folder)
    return evaluation_windows(sources, tokenizer, samples=config.samples, seq_len=config.seq_len)


def perplexity(folder: Path, config: EvalConfig, progress: Progress) -> dict[str, Any]:
    """Perplexity in decode simulation, beside the base's, on the same windows."""
    windows = evaluation_text(folder, config)
    model = load_checkpoint(folder, pick_device(config.device), config.dtype)
    layout, shape = layout_of(model), shape_of(model)
    return {
        "task": "perplexity",
        **compare(model, windows.ids, progress).summary(),
        "cache_bytes_per_token": {"base": base_bytes(shape, layout, 1), "cskv": bytes_per_token(shape, layout)},
        "samples": len(windows.ids),
        "seq_len": windows.ids.shape[1],
        "notes": list(windows.notes),
    }
