"""Scores of answers whose right score is known by hand."""

import pytest

from cskv_cli.evaluation.tasks.metrics import chinese_words, f1, recall, rouge_l, words


def test_words():
    assert words(" The quick-brown fox, an  A-B theory! ") == ["quickbrown", "fox", "ab", "theory"]


@pytest.mark.parametrize(
    "answer, truth, expected",
    [
        ("cat sat", "cat sat down", 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("cat cat cat", "cat dog", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("the cat", "a cat", 1),
        ("dog", "cat", 0),
        ("", "cat", 0),
    ],
)
def test_f1(answer, truth, expected):
    assert f1(words(answer), words(truth)) == pytest.approx(expected)


def test_recall_counts_ignored_keywords_as_missing():
    assert recall(["mary", "and", "john"], ["mary", "and", "paul", "john"], ["and"]) == 2 / 4
    assert recall(["mary"], [], []) == 0


def test_rouge_l():
    # longest common subsequence "cat down": recall 2/4, precision 2/3
    assert rouge_l("cat lies down", "cat sat right down") == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))
    assert rouge_l("", "something") == 0 and rouge_l("...", "something") == 0


def test_chinese():
    assert chinese_words("北京是中国的首都。") == ["北京", "是", "中国", "的", "首都"]
