import json
import logging

import pytest
import torch

from cskv_cli.data import windows as module
from cskv_cli.data.sources import Source, parse_source
from cskv_cli.data.windows import calibration_windows, evaluation_windows, largest_remainder, settle
from cskv_cli.errors import CskvError

EOS = 1


@pytest.fixture
def source(tmp_path, words):
    """A text file of words from `start` up to `end`."""

    def write(name, start, end, weight=1.0):
        (tmp_path / name).write_text(words(start, end))
        return Source("file", str(tmp_path / name), weight=weight)

    return write


def calibrate(sources, tokenizer, samples=4, seq_len=10, seed=0, **kwargs):
    return calibration_windows(sources, tokenizer, samples=samples, seq_len=seq_len, seed=seed, **kwargs)


def sorted_rows(ids):
    return ids[ids[:, -1].argsort()]


def tokens(start, end):
    return torch.arange(start + 3, end + 3)


def test_evaluation_takes_the_first_windows(tokenizer, source):
    result = evaluation_windows([source("a", 0, 95)], tokenizer, samples=3, seq_len=10)
    assert torch.equal(result.ids, tokens(0, 30).view(3, 10))
    assert result.ids.dtype == torch.int64
    assert list(result.counts.values()) == [3]
    assert result.notes == ()


def test_documents_are_separated_by_eos(tokenizer, tmp_path, words):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": words(n, n + 4)}) for n in (0, 10, 20)))
    result = evaluation_windows([parse_source(str(path))], tokenizer, samples=2, seq_len=7)
    stream = torch.cat([tokens(0, 4), torch.tensor([EOS]), tokens(10, 14), torch.tensor([EOS]), tokens(20, 24)])
    assert torch.equal(result.ids, stream.view(2, 7))


def test_every_window_begins_with_bos_if_texts_do(bos_tokenizer, source):
    result = evaluation_windows([source("a", 0, 95)], bos_tokenizer, samples=5, seq_len=10)
    assert torch.equal(result.ids[:, 0], torch.zeros(5, dtype=torch.int64))
    assert torch.equal(result.ids[:, 1:], tokens(0, 45).view(5, 9))


def test_calibration_draws_distinct_windows_by_seed(tokenizer, source):
    sources = [source("a", 0, 205)]
    first, again = (calibrate(sources, tokenizer, samples=6, seed=5) for _ in range(2))
    assert torch.equal(first.ids, again.ids)
    assert not torch.equal(first.ids, calibrate(sources, tokenizer, samples=6, seed=6).ids)
    allowed = {tuple(row) for row in tokens(0, 200).view(20, 10).tolist()}
    drawn = [tuple(row) for row in first.ids.tolist()]
    assert len(set(drawn)) == 6
    assert set(drawn) <= allowed
    assert drawn != sorted(drawn)


def test_short_data_repeats_and_pads_nothing(tokenizer, source):
    result = calibrate([source("a", 0, 39)], tokenizer, samples=256)
    assert torch.equal(sorted_rows(result.ids), tokens(0, 30).view(3, 10))
    (name, count), *_ = result.counts.items()
    assert count == 3
    assert result.notes == (f"{name} holds 3 windows of 10 tokens, 256 were asked for",)


def test_weights_are_exact(tokenizer, source):
    sources = [source("a", 0, 100, 1.0), source("b", 100, 200, 2.0), source("c", 200, 300, 0.5)]
    result = calibrate(sources, tokenizer, samples=8)
    assert list(result.counts.values()) == [2, 5, 1]
    of_source = ((result.ids[:, 0] - 3) // 100).tolist()
    assert [of_source.count(index) for index in range(3)] == [2, 5, 1]
    assert of_source != sorted(of_source)
    assert result.notes == ()


def test_a_short_share_goes_to_the_others(tokenizer, source):
    sources = [source("a", 0, 15), source("b", 100, 300), source("c", 300, 400)]
    result = calibrate(sources, tokenizer, samples=12)
    assert list(result.counts.values()) == [1, 6, 5]
    assert result.notes == (f"{sources[0].name} holds 1 windows of 10 tokens, 4 were asked for",)
    assert calibrate(sources, tokenizer, samples=99).notes[-1] == "31 windows in all, 99 were asked for"


def test_self_is_generated_and_gives_what_others_lack(tokenizer, source):
    calls = []

    def generate(count, seq_len, seed):
        calls.append((count, seq_len, seed))
        return torch.full((count, seq_len), 7)

    result = calibrate([source("a", 0, 15), parse_source("self")], tokenizer, samples=4, seed=9, generate=generate)
    assert calls == [(3, 10, 9)]
    assert result.counts["self"] == (result.ids == 7).all(dim=1).sum() == 3


def test_a_stream_is_read_no_further_than_needed(tokenizer, words, monkeypatch):
    read = []

    def documents(source, *, shuffle, held_out):
        for number in range(100):
            read.append(number)
            yield words(0, 9)

    monkeypatch.setattr(module, "read_documents", documents)
    calibrate([Source("hub", "o/n")], tokenizer, samples=3)
    assert len(read) == 13  # 4 * 3 windows of 10; a document gives 9 tokens and a separator, but for the first


def drawn_documents(path, tokenizer):
    """Which of several documents of 50 words a sample of one comes from, over 20 seeds."""
    source = parse_source(str(path))
    ids = torch.cat([calibrate([source], tokenizer, samples=1, seed=seed).ids for seed in range(20)])
    return set(((ids[:, 5] - 3) // 50).tolist())


def test_local_text_is_drawn_from_all_of_it(tokenizer, tmp_path, words):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": words(n * 50, n * 50 + 50)}) for n in range(8)))
    assert len(drawn_documents(path, tokenizer)) > 4


def test_a_huge_folder_is_read_in_random_order(tokenizer, tmp_path, words, monkeypatch):
    monkeypatch.setattr(module, "_LOCAL_TOKENS", 0)
    for n in range(8):
        (tmp_path / f"{n}.txt").write_text(words(n * 50, n * 50 + 50))
    assert len(drawn_documents(tmp_path, tokenizer)) > 4


def test_a_long_document_in_pieces(tokenizer, source, monkeypatch):
    monkeypatch.setattr("cskv_cli.data.tokens._PIECE", len("w10 ") * 10)
    result = evaluation_windows([source("a", 10, 90)], tokenizer, samples=8, seq_len=10)
    assert torch.equal(result.ids, tokens(10, 90).view(8, 10))


def test_too_long_is_not_warned_of(tokenizer, source, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    evaluation_windows([source("a", 0, 95)], tokenizer, samples=3, seq_len=10)
    assert not caplog.records


def test_no_window_at_all(tokenizer, source):
    with pytest.raises(CskvError, match="7 tokens are no window of 10") as caught:
        calibrate([source("a", 0, 7)], tokenizer)
    assert "--seq-len of at most 7" in caught.value.hint


def test_given_twice(tokenizer, source):
    with pytest.raises(CskvError, match="a is given twice"):
        calibrate([source("a", 0, 30), source("a", 0, 30, 2.0)], tokenizer)


def test_self_is_no_test(tokenizer):
    with pytest.raises(CskvError, match="not evaluated on its own text"):
        evaluation_windows([parse_source("self")], tokenizer, samples=1, seq_len=10)


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (48, [0.1, 0.2, 0.7], [5, 10, 33]),
        (1, [1, 3], [0, 1]),
        (0, [1, 2], [0, 0]),
        (7, [2.5], [7]),
    ],
)
def test_largest_remainder(total, weights, parts):
    assert largest_remainder(total, weights) == parts


def test_settle_in_several_rounds():
    have = [2, 5, 100]
    assert settle(18, [1, 1, 1], lambda index, share: have[index]) == ([2, 5, 11], {0: 6, 1: 6})
    # The second is short only of what the first leaves to it.
    have = [2, 7, 100]
    assert settle(18, [1, 1, 1], lambda index, share: have[index]) == ([2, 7, 9], {0: 6, 1: 8})


def test_builtin_is_split_between_calibration_and_evaluation(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(
        module, "read_documents", lambda source, **how: asked.append(how["held_out"]) or iter(["a b"] * 9)
    )
    calibrate([parse_source("builtin")], tokenizer, seq_len=4)
    evaluation_windows([parse_source("builtin")], tokenizer, samples=1, seq_len=4)
    assert asked == [False, True]
