"""`cskv eval`: what the smaller cache costs, next to other ways to make it smaller."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from cskv_cli.checkpoint.load import load_tokenizer
from cskv_cli.data.sources import parse_source
from cskv_cli.data.windows import evaluation_windows
from cskv_cli.eval_config import EvalConfig
from cskv_cli.evaluation import perplexity as text
from cskv_cli.evaluation import retrieval as lists
from cskv_cli.evaluation.methods import Method
from cskv_cli.evaluation.subjects import Subject, load_methods
from cskv_cli.evaluation.tasks import longbench as documents
from cskv_cli.evaluation.tasks import longeval as records
from cskv_cli.evaluation.tasks import lveval as mixed
from cskv_cli.evaluation.tasks import mmlu as exams
from cskv_cli.evaluation.tasks.generation import Question, answer_all, summarize
from cskv_cli.progress import Progress

DEFAULT_CASES = 100
DEFAULT_DATA = ("builtin",)
DEFAULT_DATA_NOTE = "perplexity is of text that comes with Python: --data scores yours"


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


def evaluate(job: Job, tasks: Sequence[tuple[str, Path | None]]) -> list[dict[str, Any]]:
    """The results of each task, method by method; the base (the same weights, with the full cache) beside each.

    `cache_bytes_per_token` is what a token adds to a long cache; `held_bytes_per_token` what the caches held at the end
    of the task, from their tensors, over the tokens in them.

    Args:
        tasks: name and, for a benchmark, where its files are; None: on the Hub.

    Raises:
        CskvError: the text cannot be read, a model cannot be loaded, or the lists are too long for it.
    """
    return [result for name, source in tasks for result in TASKS[name](job, source)]


def perplexity(job: Job, source: Path | None) -> list[dict[str, Any]]:
    """Perplexity as if decoded, beside the base's, on consecutive windows from the start of the text."""
    config = job.config
    sources = [parse_source(text) for text in config.data or DEFAULT_DATA]
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


def retrieval(job: Job, source: Path | None) -> list[dict[str, Any]]:
    """The share of values found in generated lists, read through the real caches."""
    config, count = job.config, job.config.cases or DEFAULT_CASES
    cases = lists.make_cases(config.entries, count, config.seed)
    tallies = lists.compare(job.methods, job.tokenizer, cases, job.progress)
    shared = {"entries": config.entries, "cases": count, "notes": []}
    return _beside_base(job, "retrieval", [{"score": tally.score} for tally in tallies], tallies, shared)


def longeval(job: Job, source: Path | None) -> list[dict[str, Any]]:
    """Lines found in LongEval records, generated or from the benchmark's files."""
    config = job.config
    if source is None:
        questions = records.generate(config.lines, config.cases or DEFAULT_CASES, config.seed)
    else:
        questions = records.load(source, config.cases)
    return _answers(job, "longeval", questions)


def longbench(job: Job, source: Path | None) -> list[dict[str, Any]]:
    """Five data sets of LongBench-E, by length."""
    return _answers(job, "longbench", documents.load(source, job.config.cases))


def lveval(job: Job, source: Path | None) -> list[dict[str, Any]]:
    """LV-Eval at 16k."""
    return _answers(job, "lveval", mixed.load(source, job.config.cases))


def mmlu(job: Job, source: Path | None) -> list[dict[str, Any]]:
    """MMLU with five examples; the score is the mean over all questions, as the benchmark's."""
    subjects = exams.load(source, job.config.cases)
    outcomes, parts, cut = exams.answer_all(job.methods, job.tokenizer, subjects, job.progress)
    summaries = [summarize(outcome.scores, parts, [""] * len(parts)) for outcome in outcomes]
    summaries = [
        summary | {"score": fmean(outcome.scores)} for summary, outcome in zip(summaries, outcomes, strict=True)
    ]
    return _beside_base(job, "mmlu", summaries, outcomes, {"cases": len(parts), "cut": cut, "notes": _cut_note(cut)})


def _answers(job: Job, task: str, questions: Sequence[Question]) -> list[dict[str, Any]]:
    config = job.config
    longest, chat = config.max_prompt, config.chat
    outcomes, cut = answer_all(job.methods, job.tokenizer, questions, chat, longest, job.progress)
    parts, buckets = ([getattr(question, what) for question in questions] for what in ("part", "bucket"))
    summaries = [summarize(outcome.scores, parts, buckets) for outcome in outcomes]
    shared = {"cases": len(questions), "cut": cut, "notes": _cut_note(cut)}
    return _beside_base(job, task, summaries, outcomes, shared)


def _cut_note(cut: int) -> list[str]:
    return [f"{cut} prompts were longer than the model's context (or --max-prompt) and cut"] if cut else []


def _beside_base(
    job: Job, task: str, summaries: Sequence[dict[str, Any]], outcomes: Sequence[Any], shared: dict[str, Any]
) -> list[dict[str, Any]]:
    """Results of the methods asked for, from those of all methods, the first of which is the base."""
    own = list(zip(job.methods, summaries, outcomes, strict=True))[-len(job.asked) :]
    return [
        job.result(
            task,
            method,
            outcome.held_bytes,
            score=summary["score"],
            **shared,
            **{"base": summaries[0], method.name: summary},
        )
        for method, summary, outcome in own
    ]


TASKS = {
    "perplexity": perplexity,
    "retrieval": retrieval,
    "longeval": longeval,
    "longbench": longbench,
    "lveval": lveval,
    "mmlu": mmlu,
}
