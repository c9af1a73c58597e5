"""Retrieval: one value is asked for out of a list of `key: value` entries, which is what a long cache is for.

The list is read in one forward, as a prompt is, and only once for all methods. The question is then given token by
token and answered greedily, so that every token after the list reads it as decoding does. (A prompt in one forward,
question and all, would show no loss in the first token of the answer: prefill is exact. A question in one forward would
see more exact tokens.)
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cskv_cli.data.tokens import text_ids
from cskv_cli.errors import CskvError
from cskv_cli.evaluation.decoding import decode
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.evaluation.methods import Method, eagerly
from cskv_cli.evaluation.prefill import Prefill, read
from cskv_cli.progress import SILENT, Progress

ANSWER_TOKENS = 8  # five digits at one token each, and what may come before them
BATCH_TOKENS = 8192  # of documents read at a time
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Case:
    """A list of entries, a question about one of them, and its five digits.

    The question repeats another entry first, to show what is wanted: SmolLM2-135M finds 40 % without it, 80 % with it.
    """

    document: str
    question: str
    value: str


@dataclass(frozen=True)
class Prompt:
    """A case as tokens."""

    document: list[int]
    question: list[int]
    value: str


def make_cases(entries: int, count: int, seed: int) -> list[Case]:
    """`count` lists of `entries` entries each, two or more; those asked for are spread evenly over the list."""
    generator = random.Random(seed)
    return [_case(entries, (2 * i + 1) * entries // (2 * count), generator) for i in range(count)]


def _case(entries: int, asked: int, generator: random.Random) -> Case:
    listed: dict[str, str] = {}
    while len(listed) < entries:
        listed[_key(generator)] = str(generator.randint(10_000, 99_999))
    lines = [f"{key}: {value}\n" for key, value in listed.items()]
    document, key = "".join(lines), list(listed)[asked]
    del lines[asked]
    return Case(document, f"\n{generator.choice(lines)}{key}:", listed[key])


def _key(generator: random.Random) -> str:
    return "".join(generator.choice(CONSONANTS) + generator.choice(VOWELS) for _ in range(3))


def is_right(answer: str, value: str) -> bool:
    """Whether the first number in `answer` is `value`, digit by digit."""
    number = re.search(r"\d+", answer)
    return number is not None and number[0] == value


def tokenize(cases: list[Case], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Documents begin with BOS where the tokenizer does so; document and question are tokenized apart."""
    return [
        Prompt(text_ids(tokenizer, case.document, begin=True), text_ids(tokenizer, case.question), case.value)
        for case in cases
    ]


@dataclass
class Tally:
    """What a method answered.

    Attributes:
        held_bytes: of its caches after the answers, per token in them.
    """

    cases: int = 0
    right: int = 0
    tokens: int = 0
    held: int = 0

    @property
    def score(self) -> float:
        """The share of right answers."""
        return self.right / self.cases

    @property
    def held_bytes(self) -> float:
        """See the class."""
        return self.held / self.tokens


def compare(
    methods: list[Method], tokenizer: PreTrainedTokenizerBase, cases: list[Case], progress: Progress = SILENT
) -> list[Tally]:
    """What each method answers; all of them have the same base weights.

    Raises:
        CskvError: a list is longer than the model's context.
    """
    prompts = tokenize(cases, tokenizer)
    _check_length(prompts, methods[0].model.config)
    tallies = [Tally() for _ in methods]
    attention = any(method.reads_attention for method in methods)
    with progress.task("answer", len(methods) * len(prompts), "questions") as advance:
        for batch in _batches(prompts):
            with eagerly(methods[0].model, attention):
                prefill = read(methods[0].model, [prompt.document for prompt in batch], attention)
            for method, tally in zip(methods, tallies, strict=True):
                _answer(method, tokenizer, prefill, batch, tally)
                advance(len(batch))
    return tallies


def _answer(
    method: Method, tokenizer: PreTrainedTokenizerBase, prefill: Prefill, batch: list[Prompt], tally: Tally
) -> None:
    decoded = decode(method, prefill, [prompt.question for prompt in batch], ANSWER_TOKENS)
    answers = tokenizer.batch_decode(decoded.tokens, skip_special_tokens=True)
    tally.cases += len(batch)
    tally.right += sum(is_right(text, prompt.value) for text, prompt in zip(answers, batch, strict=True))
    tally.tokens += len(batch) * max(layer.get_seq_length() for layer in decoded.cache.layers)
    tally.held += held_bytes(decoded.cache)


def _check_length(prompts: list[Prompt], config: PretrainedConfig) -> None:
    longest = max(len(prompt.document) + len(prompt.question) for prompt in prompts) + ANSWER_TOKENS
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise CskvError(f"a list takes {longest:,} tokens, the model {limit:,}", "give fewer --entries")


def _batches(prompts: list[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts with questions of the same length, so that each document ends where the question begins."""
    length = lambda prompt: len(prompt.question)  # noqa: E731
    for _, group in groupby(sorted(prompts, key=length), key=length):
        rest = list(group)
        rows = max(1, BATCH_TOKENS // max(len(prompt.document) for prompt in rest))
        yield from (rest[start : start + rows] for start in range(0, len(rest), rows))
