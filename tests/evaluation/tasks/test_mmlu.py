"""MMLU: its files, its prompt, and answers as the most likely letter."""

import csv
import random

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cskv_cli.errors import CskvError
from cskv_cli.evaluation.methods import cskv, full
from cskv_cli.evaluation.tasks import mmlu
from cskv_cli.progress import SILENT
from tests.families import base_model, compressed, truncated

WORDS = [*"ABCD", "Answer", *(f"w{n}" for n in range(80)), ":", ".", "\n"]


@pytest.fixture
def letters():
    """Words, and A to D as ids 3 to 6."""
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {word: 3 + n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def rows(count, seed):
    generator = random.Random(seed)
    text = lambda: " ".join(generator.choice(WORDS[5:85]) for _ in range(2))  # noqa: E731
    return [[text(), *(text() for _ in range(4)), generator.choice("ABCD")] for _ in range(count)]


def write(folder, subject, dev, test):
    folder.mkdir(exist_ok=True)
    for split, lines in (("dev", dev), ("test", test)):
        with (folder / f"{subject}_{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)


def test_files_become_the_benchmarks_prompt(tmp_path):
    dev = [["Find x, if\n2x = 4.", "1", "2", "3", "4", "B"]] * 5
    write(tmp_path / "data", "high_school_physics", dev, [["What?", "a", "b, c", "d", "e", "D"]] * 3)
    (subject,) = mmlu.load(tmp_path / "data", 2)
    assert subject.header(1) == (
        "The following are multiple choice questions (with answers) about  high school physics.\n\n"
        "Find x, if\n2x = 4.\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
    )
    assert subject.header(5).count("Answer: B\n\n") == 5
    assert [item.text() for item in subject.items] == ["What?\nA. a\nB. b, c\nC. d\nD. e\nAnswer:"] * 2
    assert subject.items[0].answer == "D"


@pytest.mark.parametrize("kind", ["full", "cskv"])
def test_the_answer_is_the_likeliest_letter_read_token_by_token(tmp_path, letters, kind):
    write(tmp_path / "data", "x", rows(5, 1), rows(12, 2))
    write(tmp_path / "data", "y", rows(5, 3), rows(4, 4))
    model = compressed(base_model("Llama", max_position_embeddings=512), truncated(4), rank=4, window=4, sinks=0)
    method = {"full": full, "cskv": cskv}[kind](model)
    subjects = mmlu.load(tmp_path / "data", None)
    (outcome,), parts, cut = mmlu.answer_all([method], letters, subjects, SILENT)
    assert parts == ["x"] * 12 + ["y"] * 4 and cut == 0
    expected = []
    for subject in subjects:
        for item in subject.items:
            prompt, question = (letters(text)["input_ids"] for text in (subject.header(5), item.text()))
            cache = method.new_cache()
            with torch.no_grad():
                model(torch.tensor([prompt]), cache=cache, use_cache=True)
                for token in question:
                    logits = model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1]
            expected.append(float("ABCD"[logits[3:7].argmax()] == item.answer))
    assert outcome.scores == expected and 0 < sum(expected) < 16


def test_examples_are_left_out_where_there_is_no_room(tmp_path, letters):
    write(tmp_path / "data", "x", rows(5, 1), rows(2, 2))
    subjects = mmlu.load(tmp_path / "data", None)
    model = base_model("Llama", max_position_embeddings=120)
    sizes = []
    spy = lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1])  # noqa: E731
    model.model.register_forward_pre_hook(spy, with_kwargs=True)
    (outcome,), _, cut = mmlu.answer_all([full(model)], letters, subjects, SILENT)
    example = len(letters(subjects[0].examples[0].text() + " B")["input_ids"])
    header = len(letters(subjects[0].header(0))["input_ids"])
    assert cut == 1 and max(sizes) == header + example * ((120 - (example - 1) - header) // example)
    assert len(outcome.scores) == 2


def test_the_hub_has_the_same_questions_in_other_columns(tmp_path, monkeypatch):
    dev, test = rows(5, 1), rows(3, 2)
    write(tmp_path / "data", "x", dev, test)

    def load_dataset(path, config, split):
        assert (path, config) == ("cais/mmlu", "all")
        lines = {"dev": dev, "test": test}[split]
        return [
            {"question": q, "subject": "x", "choices": choices, "answer": "ABCD".index(a)} for q, *choices, a in lines
        ]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert mmlu.load(None, 2) == mmlu.load(tmp_path / "data", 2)


def test_what_is_wrong_is_said(tmp_path, monkeypatch):
    write(tmp_path / "data", "x", rows(1, 1), [["only", "three", "columns"]])
    with pytest.raises(CskvError, match="x_test.csv"):
        mmlu.load(tmp_path / "data", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CskvError, match="holds no SUBJECT_dev.csv"):
        mmlu.load(tmp_path / "empty", None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("no\nroute")))
    with pytest.raises(CskvError, match="cais/mmlu cannot be read: no route"):
        mmlu.load(None, None)
