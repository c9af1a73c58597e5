"""Windows that can only be predicted by looking far back: lists to look up in, and passages to quote.

Plain text hardly trains what a cache is for. Nothing here is worded as the tasks of `cskv eval` are.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cskv_cli.data.tokens import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASKED = 0.45  # of a window: questions and answers, or the passage quoted
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiouy"


@dataclass(frozen=True)
class Window:
    """A window of tokens to train on.

    Attributes:
        ids: [tokens].
        prefill: leading tokens that are read in one forward, as a prompt is; the others are decoded.
        scored: [tokens - 1], whether the prediction of the token that follows is what matters.
    """

    ids: torch.Tensor
    prefill: int
    scored: torch.Tensor


@dataclass(frozen=True)
class Wording:
    """Of a list: its title, an entry, and a question about one, all of it but the value, which ends with `end`."""

    title: str
    entry: str
    question: str
    end: str


WORDINGS = (
    Wording("Assignments made so far\n\n", "let {name} = {value};\n", "\nassert {name} == {value}", ";"),
    Wording(
        "| item | code |\n|---|---|\n", "| {name} | {value} |\n", "\nThe table gives for {name} the code {value}", "."
    ),
    Wording("", "The number of {name} is {value}. ", "\n\nQ. Which number has {name}?\nA. It is {value}", "."),
    Wording("<store>\n", '<put id="{name}">{value}</put>\n', '\n<get id="{name}"/> returned {value}', ""),
    Wording("Inventory of the depot\n", "- {value} was handed to {name}\n", "\nWhat {name} was handed is {value}", "."),
)
QUOTES = ("\n\nOnce more, word for word:\n\n", '\n\nAs it says above, "', "\n\n> ")


def lookup_window(tokenizer: "PreTrainedTokenizerBase", seq_len: int, generator: random.Random) -> Window:
    """A list of names with values, and questions about some of them; their answers are scored."""
    wording = generator.choice(WORDINGS)
    make_name, make_value = generator.choice(NAMES), generator.choice(VALUES)
    ids, entries = text_ids(tokenizer, wording.title, begin=True), {}
    while len(ids) < (1 - ASKED) * seq_len:
        name, value = make_name(generator), make_value(generator)
        if name not in entries:
            entries[name] = value
            ids += text_ids(tokenizer, wording.entry.format(name=name, value=value))
    prefill, scored = len(ids), [False] * len(ids)
    while len(ids) < seq_len:
        name = generator.choice(list(entries))
        before, after = wording.question.format(name=name, value="\0").split("\0")
        question = before.removesuffix(" ")  # a space is a part of the token that follows it
        answer = before.removeprefix(question) + entries[name]
        for text, counts in ((question, False), (answer, True), (after + wording.end, False)):
            piece = text_ids(tokenizer, text)
            ids, scored = ids + piece, scored + [counts] * len(piece)
    return _window(ids, prefill, scored, seq_len)


def quote_window(tokenizer: "PreTrainedTokenizerBase", text: torch.Tensor, generator: random.Random) -> Window:
    """A text [seq_len] whose end is replaced by a passage from far back in it; what follows its start is scored."""
    lead = text_ids(tokenizer, generator.choice(QUOTES))
    kept = len(text) - int(ASKED * len(text))
    passage = len(text) - kept - len(lead)
    start = generator.randrange(max(1, kept // 2 - passage))
    ids = text[:kept].tolist() + lead + text[start : start + passage].tolist()
    known = 4  # tokens after which it is clear which passage it is
    return _window(ids, kept, [False] * (kept + len(lead) + known) + [True] * (passage - known), len(text))


def _window(ids: list[int], prefill: int, scored: list[bool], seq_len: int) -> Window:
    return Window(torch.tensor(ids[:seq_len]), min(prefill, seq_len), torch.tensor(scored[1:seq_len]))


def _syllable(generator: random.Random) -> str:
    return generator.choice(CONSONANTS) + generator.choice(VOWELS) + generator.choice(CONSONANTS)


def _word(generator: random.Random) -> str:
    return _syllable(generator) + _syllable(generator)


def _digits(generator: random.Random) -> str:
    return "".join(generator.choice("0123456789") for _ in range(generator.randint(3, 7)))


def _plate(generator: random.Random) -> str:
    return f"{_syllable(generator).upper()}-{generator.randint(10, 999)}"


Maker = Callable[[random.Random], str]
NAMES: tuple[Maker, ...] = (_word, lambda g: _word(g).capitalize() + " " + _word(g).capitalize(), _plate)
VALUES: tuple[Maker, ...] = (_digits, _digits, _word, _plate)
