"""MMLU (arXiv 2009.03300, github.com/hendrycks/test), five examples, read from the compressed cache.

The examples of a subject are the prompt. The question is then read token by token, as decoding reads them, and the most
likely of the four letters is the answer: each of its tokens sees the examples, and the question so far, in the cache.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cskv_cli.data.tokens import text_ids
from cskv_cli.errors import CskvError
from cskv_cli.evaluation.decoding import decode
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.evaluation.methods import Method, eagerly
from cskv_cli.evaluation.prefill import read
from cskv_cli.evaluation.tasks.archive import files
from cskv_cli.evaluation.tasks.generation import Outcome, room_for
from cskv_cli.progress import Progress

LETTERS = "ABCD"
SHOTS = 5


@dataclass(frozen=True)
class Item:
    """A question, its four choices, and the letter of the right one."""

    question: str
    choices: tuple[str, ...]
    answer: str

    def text(self) -> str:
        """As the benchmark's evaluate.py writes it, up to the answer."""
        choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"{self.question}{choices}\nAnswer:"


@dataclass(frozen=True)
class Subject:
    """Examples and questions of one subject."""

    name: str
    examples: Sequence[Item]
    items: Sequence[Item]

    def header(self, shots: int) -> str:
        """The prompt of so many examples."""
        topic = "".join(f" {word}" for word in self.name.split("_"))  # after "about ", so there are two spaces
        shown = "".join(f"{item.text()} {item.answer}\n\n" for item in self.examples[:shots])
        return f"The following are multiple choice questions (with answers) about {topic}.\n\n{shown}"


def load(source: Path | None, cases: int | None) -> list[Subject]:
    """Subjects of `<subject>_dev.csv` and `<subject>_test.csv` in a folder or archive, or of cais/mmlu on the Hub.

    Args:
        cases: of each subject at most.

    Raises:
        CskvError: there is no subject with both files, or a row is not as it should be.
    """
    sets = _from_hub() if source is None else _from_files(source)
    names = sorted(sets["dev"].keys() & sets["test"].keys())
    if not names:
        raise CskvError(f"{source} holds no SUBJECT_dev.csv and SUBJECT_test.csv", "name the folder they are in")
    return [Subject(name, sets["dev"][name], sets["test"][name][:cases]) for name in names]


def answer_all(
    methods: Sequence[Method], tokenizer: PreTrainedTokenizerBase, subjects: Sequence[Subject], progress: Progress
) -> tuple[list[Outcome], list[str], int]:
    """The outcome of each method, the subject of each question, and how many subjects got fewer examples, for room."""
    model, outcomes, parts, cut = methods[0].model, [Outcome() for _ in methods], [], 0
    attention = any(method.reads_attention for method in methods)
    letters = [text_ids(tokenizer, f" {letter}")[-1] for letter in LETTERS]
    total = len(methods) * sum(len(subject.items) for subject in subjects)
    with progress.task("answer", total, "questions") as advance:
        for subject in subjects:
            room = room_for(model, max(len(text_ids(tokenizer, item.text())) for item in subject.items), None)
            prompts = [text_ids(tokenizer, subject.header(k), begin=True) for k in range(SHOTS, -1, -1)]
            prompt = next((prompt for prompt in prompts if len(prompt) <= room), prompts[-1])
            cut += prompt is not prompts[0]
            with eagerly(model, attention):
                prefill = read(model, [prompt], attention)
            for item in subject.items:
                parts.append(subject.name)
                question = text_ids(tokenizer, item.text())
                for method, outcome in zip(methods, outcomes, strict=True):
                    decoded = decode(method, prefill, [question], 1)
                    chosen = LETTERS[decoded.logits[0, letters].argmax().item()]
                    size = held_bytes(decoded.cache)
                    outcome.add(float(chosen == item.answer), size, len(prompt) + len(question))
                    advance(1)
    return outcomes, parts, cut


def _from_files(source: Path) -> dict[str, dict[str, list[Item]]]:
    sets: dict[str, dict[str, list[Item]]] = {"dev": {}, "test": {}}
    for name, content in files(source):
        for split, subjects in sets.items():
            if name.endswith(f"_{split}.csv"):
                rows = csv.reader(io.StringIO(content.decode("utf-8")))
                subjects[name.removesuffix(f"_{split}.csv")] = [_item(name, row) for row in rows]
    return sets


def _item(name: str, row: list[str]) -> Item:
    if len(row) != 6 or row[5] not in LETTERS:
        raise CskvError(f"{name}: {row} is not question, four choices and letter", "give the benchmark's own file")
    return Item(row[0], tuple(row[1:5]), row[5])


def _from_hub() -> dict[str, dict[str, list[Item]]]:
    import datasets

    sets: dict[str, dict[str, list[Item]]] = {"dev": {}, "test": {}}
    try:
        for split, subjects in sets.items():
            for row in datasets.load_dataset("cais/mmlu", "all", split=split):
                item = Item(row["question"], tuple(row["choices"]), LETTERS[row["answer"]])
                subjects.setdefault(row["subject"], []).append(item)
    except Exception as error:  # the library raises its own errors and those of four others
        reason = " ".join(str(error).split())[:300]
        hint = "connect, or give a local copy behind a colon: --task mmlu:FOLDER"
        raise CskvError(f"data set cais/mmlu cannot be read: {reason}", hint) from error
    return sets
