"""Windows to look back in: what is scored is what stands far back, and the prompt ends where decoding begins."""

import random
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cskv_cli.data.recall import WORDINGS, lookup_window, quote_window
from cskv_cli.evaluation.retrieval import make_cases

SEQ_LEN = 2000


@pytest.fixture(scope="module")
def bytewise():
    """A token for each byte, and a BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def answers(window, tokenizer):
    """The scored runs, as text."""
    ids, runs = window.ids[1:], []
    for i in window.scored.nonzero()[:, 0].tolist():
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [tokenizer.decode(ids[run]) for run in runs]


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_stands_in_the_list_beside_its_name(bytewise, seed):
    window = lookup_window(bytewise, SEQ_LEN, random.Random(seed))
    assert window.ids.shape == (SEQ_LEN,) and window.scored.shape == (SEQ_LEN - 1,)
    assert not window.scored[: window.prefill - 1].any()
    listed, asked = bytewise.decode(window.ids[: window.prefill]), bytewise.decode(window.ids[window.prefill :])
    found = [answer.strip() for answer in answers(window, bytewise)][:-1]  # the last may be cut off
    assert len(found) >= 4
    for wording in WORDINGS:
        entry = re.escape(wording.entry).replace(r"\{name\}", "(?P<name>.+?)").replace(r"\{value\}", "(?P<value>.+?)")
        entries = {match["name"]: match["value"] for match in re.finditer(entry, listed)}
        if len(entries) > 5:
            break
    start = 0
    for value in found:
        names = [name for name in entries if entries[name] == value]
        places = [asked.find(wording.question.format(name=name, value=value), start) for name in names]
        start = min(place for place in places if place >= 0) + 1


def test_names_are_listed_once(bytewise):
    for seed in range(10):
        window = lookup_window(bytewise, SEQ_LEN, random.Random(seed))
        lines = bytewise.decode(window.ids[: window.prefill]).split("\n")
        assert len(set(lines)) >= len(lines) - 2


@pytest.mark.parametrize("seed", range(10))
def test_a_quote_is_a_passage_from_the_first_half(bytewise, seed):
    text = torch.randint(0, 200, (400,), generator=torch.Generator().manual_seed(seed))
    window = quote_window(bytewise, text, random.Random(seed))
    assert window.ids.shape == (400,) and torch.equal(window.ids[: window.prefill], text[: window.prefill])
    scored = window.ids[1:][window.scored]
    assert len(scored) > 80 and window.scored[-len(scored) :].all()
    places = [i for i in range(200) if torch.equal(text[i : i + len(scored)], scored)]
    assert len(places) == 1
    assert torch.equal(text[places[0] - 4 : places[0]], window.ids[-len(scored) - 4 : -len(scored)])


def test_nothing_is_worded_as_in_the_evaluation(bytewise):
    case = make_cases(20, 1, 0)[0]
    pattern = re.compile(r"^[a-z]{6}: \d{5}$", re.MULTILINE)
    assert pattern.search(case.document)
    for seed in range(60):
        assert not pattern.search(bytewise.decode(lookup_window(bytewise, SEQ_LEN, random.Random(seed)).ids))
