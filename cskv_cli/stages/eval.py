"""`cskv eval`: what the smaller cache costs, next to other ways to make it smaller."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cskv_cli.checkpoint.load import load_tokenizer
from cskv_cli.config import EvalConfig
from cskv_cli.data.sources import parse_source
from cskv_cli.data.windows import evaluation_windows
from cskv_cli.evaluation import perplexity as text
from cskv_cli.evaluation import retrieval as lists
from cskv_cli.evaluation.methods import Method
from cskv_cli.evaluation.subjects import Subject, load_methods
from cskv_cli.progress import Progress

DEFAULT_DATA = ("builtin",)
DEFAULT_DATA_NOTE = (
    "perplexity is of text that comes with Python, and calibration may have seen it: --data scores yours"
)


@dataclass(frozen=True)
class Job:
    """What the tasks need; models are loaded when the first of them asks, after its data was read.

    Attributes:
        names: methods, as in `evaluation.methods.NAMES`.
        calibrated: folder of the calibrate stage, for asvd.
    """

    subjects: Sequence[Subject]
    names: Sequence[str]
    config: EvalConfig
    progress: Progress
    calibrated: Path | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the first model; the others have the same base."""
        return load_tokenizer(self.subjects[0].folder)

    @cached_property
    def methods(self) -> list[Method]:
        """The full cache, then those asked for."""
        return load_methods(self.subjects, self.names, self.config, self.calibrated)

    @property
    def asked(self) -> list[Method]:
        """Those asked for."""
        return self.methods if "full" in self.names else self.methods[1:]

    def result(self, task: str, method: Method, held: float, **fields: Any) -> dict[str, Any]:
        """One entry of the report."""
        base = self.methods[0].token_bytes
        return {
            "task": task,
            "model": method.source,
            "method": method.name,
            **method.settings,
            **fields,
            "cache_bytes_per_token": {"base": base, method.name: method.token_bytes},
            "held_bytes_per_token": {"base": base, method.name: held},
        }


def evaluate(job: Job, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """The results of each task, method by method; the base (the same weights, with the full cache) beside each.

    `cache_bytes_per_token` is what a token adds to a long cache; `held_bytes_per_token` what the caches held at the end
    of the task, from their tensors, over the tokens in them.

    Raises:
        CskvError: the text cannot be read, a model cannot be loaded, or the lists are too long for it.
    """
    return [result for task in tasks for result in TASKS[task](job)]


def perplexity(job: Job) -> list[dict[str, Any]]:
    """Perplexity as if decoded, beside the base's, on consecutive windows from the start of the text."""
    config = job.config
    sources = [parse_source(source) for source in config.data or DEFAULT_DATA]
    windows = evaluation_windows(sources, job.tokenizer, samples=config.samples, seq_len=config.seq_len)
    shared = {
        "samples": len(windows.ids),
        "seq_len": windows.ids.shape[1],
        "notes": [*([] if config.data else [DEFAULT_DATA_NOTE]), *windows.notes],
    }
    results = []
    for method, total in zip(job.asked, text.compare(job.asked, windows.ids, job.progress), strict=True):
        summary = total.summary(method.name)
        score = summary[method.name]["perplexity"]
        results.append(job.result("perplexity", method, total.held_bytes, score=score, **summary, **shared))
    return results


def retrieval(job: Job) -> list[dict[str, Any]]:
    """The share of values found in generated lists, read through the real caches."""
    config = job.config
    cases = lists.make_cases(config.entries, config.cases, config.seed)
    tallies = lists.compare(job.methods, job.tokenizer, cases, job.progress)
    scores = {"entries": config.entries, "cases": config.cases, "base": {"score": tallies[0].score}, "notes": []}
    return [
        job.result(
            "retrieval", method, tally.held_bytes, score=tally.score, **scores, **{method.name: {"score": tally.score}}
        )
        for method, tally in zip(job.asked, tallies[-len(job.asked) :], strict=True)
    ]


TASKS = {"perplexity": perplexity, "retrieval": retrieval}
