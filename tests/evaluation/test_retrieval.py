"""Retrieval: its cases, its scorer, and what it sees of the cache."""

import re

import pytest
import torch

from cskv_cli.errors import CskvError
from cskv_cli.evaluation import retrieval
from cskv_cli.evaluation.decoding import Decoded, decode
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.evaluation.methods import by_ratio, cskv, eagerly, full, kivi
from cskv_cli.evaluation.prefill import read
from cskv_cli.evaluation.retrieval import ANSWER_TOKENS, Case, compare, is_right, make_cases
from cskv_cli.modeling.modeling_cskv import CACHE
from tests.families import base_model, compressed, truncated
from tests.modeling import decoding
from tests.modeling.decoding import tokens

DOCUMENTS = [tokens(31, seed=1).tolist(), tokens(24, seed=2).tolist(), tokens(5, seed=3).tolist()]
QUESTIONS = [tokens(6, seed=seed).tolist() for seed in (4, 5, 6)]


def entries_of(case):
    return dict(re.findall(r"^(\S+): (\d+)$", case.document, re.MULTILINE))


def asked(case):
    """The place in the list of the key that the question ends with."""
    return list(entries_of(case)).index(re.search(r"(\w+):$", case.question)[1])


@pytest.mark.parametrize("entries, count", [(60, 100), (60, 20), (7, 3), (2, 2)])
def test_cases_have_distinct_keys_and_one_answer(entries, count):
    cases = make_cases(entries, count, seed=0)
    assert len(cases) == count
    for case in cases:
        listed = entries_of(case)
        assert len(listed) == entries
        assert all(len(value) == 5 and value[0] != "0" for value in listed.values())
        assert list(listed.values())[asked(case)] == case.value
        example = re.match(r"\n(\w+: \d+\n)", case.question)[1]
        assert example in case.document and case.value not in example


def test_keys_are_distinct_where_few_are_possible(monkeypatch):
    monkeypatch.setattr(retrieval, "CONSONANTS", "bd")
    monkeypatch.setattr(retrieval, "VOWELS", "a")
    assert [len(entries_of(case)) for case in make_cases(8, 3, seed=0)] == [8, 8, 8]


def test_asked_entries_spread_evenly_over_the_list():
    places = [asked(case) for case in make_cases(60, 100, seed=0)]
    assert places == sorted(places) and set(places) == set(range(60))
    assert [asked(case) for case in make_cases(60, 3, seed=0)] == [10, 30, 50]


def test_the_seed_says_it_all():
    assert make_cases(9, 4, seed=1) == make_cases(9, 4, seed=1)
    assert make_cases(9, 4, seed=1) != make_cases(9, 4, seed=2)


@pytest.mark.parametrize(
    "text, right",
    [
        (" 12345", True),
        ("12345\nbakoru: 54321", True),
        (" **12345**.", True),
        (" 54321\nbakoru: 12345", False),
        (" 123456", False),
        (" 1234", False),
        (" 1 2345", False),
        (" 12,345", False),
        ("", False),
        (" no number", False),
    ],
)
def test_the_first_number_counts_and_all_of_it(text, right):
    assert is_right(text, "12345") == right


def answer(method, documents, questions):
    with eagerly(method.model, method.reads_attention):
        prefill = read(method.model, documents, method.reads_attention)
    return decode(method, prefill, questions, ANSWER_TOKENS).tokens


def greedy_alone(method, document, question):
    """The answer of a loop over one unpadded row, which fills the method's own cache by a forward."""
    model, cache = method.model, method.new_cache()
    with method.ready():
        decoding.decode(model, torch.tensor([document]), [len(document)], cache=cache)
        given = list(question)
        for i in range(len(question) + ANSWER_TOKENS - 1):
            logits = decoding.decode(model, torch.tensor([given[i : i + 1]]), [1], cache=cache)
            if i >= len(question) - 1:
                given.append(logits[0, -1].argmax().item())
    return given[len(question) :]


METHODS = {
    "full": full,
    "cskv": cskv,
    "streaming-llm": lambda model: by_ratio("streaming-llm", model, 0.5),
    "h2o": lambda model: by_ratio("h2o", model, 0.5),
    "svd-cache": lambda model: by_ratio("svd-cache", model, 0.5),
    "kivi": lambda model: kivi(model, 8),
}


@pytest.mark.parametrize("family", ["Llama:bias", "Gemma3"])
@pytest.mark.parametrize("name", METHODS)
def test_a_padded_batch_filled_from_one_prefill_answers_as_each_row_alone(name, family):
    model = compressed(base_model(family), truncated(9), rank=9, window=8, sinks=2)
    method = METHODS[name](model)
    found = answer(method, DOCUMENTS, QUESTIONS).tolist()
    assert found == [greedy_alone(method, *row) for row in zip(DOCUMENTS, QUESTIONS, strict=True)]


@pytest.mark.parametrize("name", METHODS)
def test_a_cache_filled_from_a_prefill_holds_what_a_forward_leaves_in_it(name):
    method = METHODS[name](compressed(base_model("Gemma3"), truncated(9), rank=9, window=8, sinks=2))
    ids = tokens(2, 40, seed=7)
    with eagerly(method.model, method.reads_attention), torch.inference_mode():
        filled = read(method.model, ids.tolist(), method.reads_attention).fill(method.model, method.new_cache())
    other = method.new_cache()
    with method.ready(), torch.inference_mode():
        decoding.run(method.model, ids, other, mask=torch.ones_like(ids))
    pairs = list(zip(decoding.held_tensors(filled), decoding.held_tensors(other), strict=True))
    assert len(pairs) >= 8
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
    assert held_bytes(filled) <= held_bytes(other)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_at_full_rank_the_answer_is_the_base_models(family):
    base = base_model(family)
    model = compressed(base, window=8, sinks=2)
    expected = answer(full(base), DOCUMENTS, QUESTIONS)
    assert torch.equal(answer(cskv(model), DOCUMENTS, QUESTIONS), expected)
    assert torch.equal(answer(full(model), DOCUMENTS, QUESTIONS), expected)


@pytest.mark.parametrize("name", ["cskv", "streaming-llm"])
def test_the_first_token_of_the_answer_is_read_from_the_compressed_cache(name):
    """A prompt in one forward, question and all, would show no loss there."""
    model = compressed(base_model("Llama"), truncated(3), rank=3, window=1, sinks=0)
    exact = answer(full(model), DOCUMENTS, QUESTIONS)
    assert (answer(METHODS[name](model), DOCUMENTS, QUESTIONS) != exact)[:, 0].any()


def test_only_the_documents_are_read_in_one_forward_and_positions_begin_at_their_first_token():
    model = compressed(base_model("Llama"), window=8, sinks=2)
    sizes, positions = [], []

    def spy(module, args, kwargs):
        sizes.append(kwargs["input_ids"].shape[1])
        positions.append(kwargs["position_ids"][:, -1].tolist())

    model.model.register_forward_pre_hook(spy, with_kwargs=True)
    answer(cskv(model), DOCUMENTS, QUESTIONS)
    assert sizes == [31] + [1] * (len(QUESTIONS[0]) + ANSWER_TOKENS - 1)
    assert positions[:3] == [[30, 23, 4], [31, 24, 5], [32, 25, 6]]


def test_a_prompt_alone_goes_on_as_generate_does_and_stops_at_the_end():
    model = base_model("Llama")
    ids = torch.tensor(DOCUMENTS[:1])
    expected = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    prefill = read(model, DOCUMENTS[:1])
    assert decode(full(model), prefill, [[]], 12).tokens[0].tolist() == expected
    end = expected[5]
    stopped = decode(full(model), prefill, [[]], 12, stop={end}).tokens[0].tolist()
    assert stopped == expected[: expected.index(end) + 1]


class Digits:
    """A tokenizer of characters that spells its ids in plain text."""

    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + ord(c) % 90 for c in text]}

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(chr(token) for token in row) for row in rows]


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_score_of_forced_answers(monkeypatch, wrong):
    """The documents tell the case, so that an answer that lands in another row is a wrong one."""
    cases = [Case(f"list {i}" * (i + 1), "?" * (1 + i % 2), str(11111 * (i + 1))) for i in range(4)]
    known = {tuple(Digits()(case.document)["input_ids"]): case.value for case in cases}
    bad = {case.value for case in cases[:wrong]}

    def forced(method, prefill, questions, count):
        values = [known[tuple(document)] for document in prefill]
        if method.name == "cskv":
            values = ["00000" if value in bad else value for value in values]
        return Decoded([[ord(c) for c in f" {value}\n"] for value in values], None, method.new_cache())

    monkeypatch.setattr(retrieval, "read", lambda model, documents, attention: documents)
    monkeypatch.setattr(retrieval, "decode", forced)
    monkeypatch.setattr(retrieval, "held_bytes", lambda cache: 0)
    monkeypatch.setattr(retrieval, "BATCH_TOKENS", 40)
    model = compressed(base_model("Llama"))
    base, cskv_ = compare([full(model), cskv(model)], Digits(), cases)
    assert (base.score, cskv_.score) == (1.0, 1 - wrong / 4)


def test_lists_beyond_the_models_context_are_refused():
    model = base_model("Llama", max_position_embeddings=64)
    with pytest.raises(CskvError, match="64"):
        compare([full(model)], Digits(), make_cases(8, 1, seed=0))


def test_a_batch_is_read_once_for_all_methods():
    model = compressed(base_model("Llama"), truncated(9), rank=9, window=8)
    read_at_once = []

    def spy(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            read_at_once.append(type(kwargs[CACHE]).__name__)

    model.model.register_forward_pre_hook(spy, with_kwargs=True)
    tallies = compare([make(model) for make in METHODS.values()], Digits(), make_cases(3, 2, seed=0))
    assert len(read_at_once) == 1 and [tally.cases for tally in tallies] == [2] * len(METHODS)
    assert tallies[0].held_bytes == 4 * 2 * 32 * 4  # the full cache: all that a token adds
