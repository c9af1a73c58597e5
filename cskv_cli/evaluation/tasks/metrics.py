"""Scores of an answer, 0 to 1, as the benchmarks have them (metrics.py of THUDM/LongBench and infinigence/LVEval)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cskv_cli.errors import CskvError

_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_MARKS = str.maketrans("", "", string.punctuation)
_ALL_MARKS = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)


def words(text: str) -> list[str]:
    """Words in small letters, without punctuation and articles (as SQuAD has them)."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_MARKS)).split()


def chinese_words(text: str) -> list[str]:
    """Words as jieba cuts them, without punctuation and white space."""
    bare = ("".join(word.lower().translate(_ALL_MARKS).split()) for word in _jieba().cut(text))
    return [word for word in bare if word]


def f1(answer: Sequence[str], truth: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, counted as often as both have them."""
    common = sum((Counter(answer) & Counter(truth)).values())
    return 2 * common / (len(answer) + len(truth)) if common else 0.0


def recall(answer: Sequence[str], keywords: Sequence[str], ignored: Sequence[str]) -> float:
    """Share of the keywords in an answer; ignored ones are not found, but count among them."""
    common = Counter(answer) & Counter(keywords)
    found = sum(count for word, count in common.items() if word not in ignored)
    return found / len(keywords) if keywords else 0.0


def rouge_l(answer: str, truth: str) -> float:
    """ROUGE-L F-measure as the `rouge` package has it; 0 for an empty text."""
    try:
        from rouge import Rouge
    except ImportError as error:
        raise _lacking("rouge") from error
    try:
        return Rouge().get_scores([answer], [truth], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def _jieba() -> Any:
    try:
        import jieba
    except ImportError as error:
        raise _lacking("jieba") from error
    jieba.setLogLevel("ERROR")
    return jieba


def _lacking(package: str) -> CskvError:
    return CskvError(f"this benchmark's score needs the package {package}", "run: pip install 'cskv[benchmarks]'")
