"""Benchmarks that ask a question about a long text and score the answer that is generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cskv_cli.data.tokens import text_ids
from cskv_cli.errors import CskvError
from cskv_cli.evaluation.decoding import decode
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.evaluation.methods import Method, eagerly
from cskv_cli.evaluation.prefill import read
from cskv_cli.progress import Progress


@dataclass(frozen=True)
class Question:
    """A prompt and what to make of its answer.

    Attributes:
        part: data set of the benchmark that it is from.
        score: of an answer, 0 to 1.
        answer_tokens: to generate at most.
        chat: put it into the model's chat template, where there is one.
        bucket: of its length; empty where the benchmark has none.
    """

    part: str
    prompt: str
    score: Callable[[str], float]
    answer_tokens: int
    chat: bool = True
    bucket: str = ""


@dataclass
class Outcome:
    """What a method scored, question by question, and the bytes its caches held."""

    scores: list[float] = field(default_factory=list)
    tokens: int = 0
    held: int = 0

    def add(self, score: float, held: int, tokens: int) -> None:
        """One more answer."""
        self.scores.append(score)
        self.held += held
        self.tokens += tokens

    @property
    def held_bytes(self) -> float:
        """Per token in the caches."""
        return self.held / self.tokens


def summarize(scores: Sequence[float], parts: Sequence[str], buckets: Sequence[str]) -> dict[str, Any]:
    """The mean of each part and of its buckets, and the means of these over the parts."""
    summary: dict[str, Any] = {}
    for part in dict.fromkeys(parts):
        mine = [(score, b) for score, p, b in zip(scores, parts, buckets, strict=True) if p == part]
        summary[part] = {"score": fmean(score for score, _ in mine), "cases": len(mine)}
        if any(bucket for _, bucket in mine):
            names = sorted({bucket for _, bucket in mine})
            summary[part]["by_length"] = {name: fmean(s for s, bucket in mine if bucket == name) for name in names}
    lengths = [entry["by_length"] for entry in summary.values() if "by_length" in entry]
    names = sorted({name for means in lengths for name in means})
    over = {name: fmean(means[name] for means in lengths if name in means) for name in names}
    score = {"score": fmean(entry["score"] for entry in summary.values()), "parts": summary}
    return score | ({"by_length": over} if over else {})


def answer_all(
    methods: Sequence[Method],
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    chat: bool,
    longest: int | None,
    progress: Progress,
) -> tuple[list[Outcome], int]:
    """The outcome of each method, and how many prompts were cut.

    A prompt is read in one forward, so the first token of an answer is the base model's; all others come from the
    method's cache.

    Args:
        longest: tokens of a prompt; None: what the context holds beside the answer.
    """
    model, outcomes, cut = methods[0].model, [Outcome() for _ in methods], 0
    attention = any(method.reads_attention for method in methods)
    stop = end_tokens(model, tokenizer)
    with progress.task("answer", len(methods) * len(questions), "questions") as advance:
        for question in questions:
            room = room_for(model, question.answer_tokens, longest)
            ids, was_cut = prompt_tokens(question, tokenizer, room, chat)
            cut += was_cut
            with eagerly(model, attention):
                prefill = read(model, [ids], attention)
            for method, outcome in zip(methods, outcomes, strict=True):
                decoded = decode(method, prefill, [[]], question.answer_tokens, stop)
                text = tokenizer.decode(decoded.tokens[0], skip_special_tokens=True)
                outcome.add(question.score(text), held_bytes(decoded.cache), len(ids) + decoded.tokens.shape[1] - 1)
                advance(1)
    return outcomes, cut


def prompt_tokens(
    question: Question, tokenizer: PreTrainedTokenizerBase, room: int, chat: bool
) -> tuple[list[int], bool]:
    """A question as token ids, and whether its middle was cut out to fit, as LongBench does."""
    wrap = chat and question.chat and tokenizer.chat_template is not None
    encode = _templated if wrap else _plain
    ids = encode(question.prompt, tokenizer)
    if len(ids) <= room:
        return ids, False
    bare = text_ids(tokenizer, question.prompt)
    half = (room - len(encode("", tokenizer))) // 2
    while half > 0:
        text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (bare[:half], bare[-half:]))
        if len(ids := encode(text, tokenizer)) <= room:
            return ids, True
        half -= -(-(len(ids) - room) // 2)  # put together, the halves may take more tokens
    raise CskvError(f"no prompt fits in {room} tokens", "give a larger --max-prompt, or use a model with more context")


def room_for(model: PreTrainedModel, answer_tokens: int, longest: int | None) -> int:
    """Tokens that a prompt may take."""
    limit = getattr(model.config, "max_position_embeddings", None)
    rooms = [room for room in (longest, None if limit is None else limit - answer_tokens) if room is not None]
    return min(rooms, default=1 << 62)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end an answer."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {token for token in (*ends, tokenizer.eos_token_id) if token is not None}


def _plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return text_ids(tokenizer, text, begin=True)


def _templated(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text_ids(tokenizer, chat)
