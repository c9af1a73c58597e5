"""Retrieval: one value is asked for out of a list of `key: value` entries, which is what a long cache is for.

The list is read in one forward, as a prompt is. The question is then given token by token and answered greedily, so
that every token after the list reads it as decoding does. (A prompt in one forward, question and all, would show no
loss in the first token of the answer: prefill is exact. A question in one forward would see more exact tokens.)
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from cskv_cli.data.tokens import leading_bos
from cskv_cli.errors import CskvError
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.modeling_cskv import CACHE
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
    bos = leading_bos(tokenizer)
    begin = [] if bos is None else [bos]
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    return [Prompt(begin + ids(case.document), ids(case.question), case.value) for case in cases]


def compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cases: list[Case], progress: Progress = SILENT
) -> dict[str, dict[str, float]]:
    """The share of cases that a CSKV model answers rightly, with the base's cache and with its own.

    Raises:
        CskvError: a list is longer than the model's context.
    """
    prompts = tokenize(cases, tokenizer)
    _check_length(prompts, model)
    caches = {"base": lambda: DynamicCache(config=model.config), "cskv": lambda: CSKVCache(model.config)}
    with progress.task("answer", len(caches) * len(prompts), "questions") as advance:
        return {
            name: {"score": _score(model, tokenizer, prompts, new_cache, advance)} for name, new_cache in caches.items()
        }


def _check_length(prompts: list[Prompt], model: PreTrainedModel) -> None:
    longest = max(len(prompt.document) + len(prompt.question) for prompt in prompts) + ANSWER_TOKENS
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise CskvError(f"a list takes {longest:,} tokens, the model {limit:,}", "give fewer --entries")


def _score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    new_cache: Callable[[], Cache],
    advance: Callable[[int], None],
) -> float:
    right = 0
    for batch in _batches(prompts):
        tokens = answer(model, new_cache(), [p.document for p in batch], [p.question for p in batch])
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        right += sum(is_right(text, prompt.value) for text, prompt in zip(answers, batch, strict=True))
        advance(len(batch))
    return right / len(prompts)


def _batches(prompts: list[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts with questions of the same length, so that each document ends where the question begins."""
    length = lambda prompt: len(prompt.question)  # noqa: E731
    for _, group in groupby(sorted(prompts, key=length), key=length):
        rest = list(group)
        rows = max(1, BATCH_TOKENS // max(len(prompt.document) for prompt in rest))
        yield from (rest[start : start + rows] for start in range(0, len(rest), rows))


@torch.inference_mode()
def answer(
    model: PreTrainedModel, cache: Cache, documents: list[list[int]], questions: list[list[int]]
) -> torch.Tensor:
    """Read the documents into an empty cache, then the questions token by token, and answer greedily.

    Args:
        documents: token ids; shorter ones are padded on the left.
        questions: token ids, all of the same length.

    Returns:
        Token ids [rows, ANSWER_TOKENS].
    """
    longest = max(map(len, documents))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in documents], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in documents], device=model.device)
    _read(model, cache, ids, mask)
    tokens = list(torch.tensor(questions, device=model.device).unbind(1))
    for i in range(len(tokens) + ANSWER_TOKENS - 1):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = _read(model, cache, tokens[i][:, None], mask)
        if i + 1 == len(tokens):
            tokens.append(logits.argmax(-1))
    return torch.stack(tokens[-ANSWER_TOKENS:], dim=1)


def _read(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] after the last of ids [rows, new]; mask [rows, tokens so far] is 0 on padding."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    inputs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, CACHE: cache}
    return model(ids, use_cache=True, logits_to_keep=1, **inputs).logits[:, -1]
