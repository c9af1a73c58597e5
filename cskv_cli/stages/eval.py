"""`cskv eval`: what the smaller cache costs."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cskv_cli.checkpoint.load import layout_of, load_checkpoint, load_tokenizer, shape_of
from cskv_cli.config import EvalConfig
from cskv_cli.data.sources import parse_source
from cskv_cli.data.windows import evaluation_windows
from cskv_cli.devices import pick_device
from cskv_cli.evaluation import perplexity as text
from cskv_cli.evaluation import retrieval as lists
from cskv_cli.memory import base_bytes, bytes_per_token
from cskv_cli.progress import Progress

DEFAULT_DATA = ("builtin",)
DEFAULT_DATA_NOTE = (
    "perplexity is of text that comes with Python, and calibration may have seen it: --data scores yours"
)


class Checkpoint:
    """What the tasks need of a checkpoint, loaded when the first of them asks."""

    def __init__(self, folder: Path, config: EvalConfig) -> None:
        self.folder, self.config = folder, config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in its folder."""
        return load_tokenizer(self.folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The CSKV model, on the device and in the precision asked for."""
        return load_checkpoint(self.folder, pick_device(self.config.device), self.config.dtype)

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """What a token adds to a long cache, in bytes."""
        layout, shape = layout_of(self.model), shape_of(self.model)
        return {"base": base_bytes(shape, layout, 1), "cskv": bytes_per_token(shape, layout)}


def evaluate(folder: Path, tasks: Iterable[str], config: EvalConfig, progress: Progress) -> list[dict[str, Any]]:
    """The result of each task, in order; the base (the same weights, with its own cache) beside CSKV.

    Raises:
        CskvError: the text cannot be read, the checkpoint cannot be loaded, or the lists are too long for it.
    """
    checkpoint = Checkpoint(folder, config)
    return [TASKS[task](checkpoint, config, progress) for task in tasks]


def perplexity(checkpoint: Checkpoint, config: EvalConfig, progress: Progress) -> dict[str, Any]:
    """Perplexity in decode simulation, beside the base's, on consecutive windows from the start of the text."""
    sources = [parse_source(source) for source in config.data or DEFAULT_DATA]
    windows = evaluation_windows(sources, checkpoint.tokenizer, samples=config.samples, seq_len=config.seq_len)
    return {
        "task": "perplexity",
        **text.compare(checkpoint.model, windows.ids, progress).summary(),
        "cache_bytes_per_token": checkpoint.bytes_per_token,
        "samples": len(windows.ids),
        "seq_len": windows.ids.shape[1],
        "notes": [*([] if config.data else [DEFAULT_DATA_NOTE]), *windows.notes],
    }


def retrieval(checkpoint: Checkpoint, config: EvalConfig, progress: Progress) -> dict[str, Any]:
    """The share of values found in generated lists, read through the real caches."""
    cases = lists.make_cases(config.entries, config.cases, config.seed)
    return {
        "task": "retrieval",
        "entries": config.entries,
        "cases": config.cases,
        **lists.compare(checkpoint.model, checkpoint.tokenizer, cases, progress),
        "cache_bytes_per_token": checkpoint.bytes_per_token,
        "notes": [],
    }


TASKS = {"perplexity": perplexity, "retrieval": retrieval}
