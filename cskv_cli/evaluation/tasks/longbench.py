"""LongBench-E (arXiv 2308.14508, github.com/THUDM/LongBench): the five data sets of CSKV's paper, by length."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cskv_cli.errors import CskvError
from cskv_cli.evaluation.tasks.archive import files, hub_archive, json_rows
from cskv_cli.evaluation.tasks.generation import Question
from cskv_cli.evaluation.tasks.metrics import f1, rouge_l, words

PROMPTS = Path(__file__).parent / "prompts" / "longbench.json"
BUCKETS = {4000: "0-4k", 8000: "4-8k"}  # by the row's own `length`, in words


def load(source: Path | None, cases: int | None) -> list[Question]:
    """Questions of `<data set>_e.jsonl` in a folder or archive, or in the benchmark's archive on the Hub.

    Args:
        cases: of each data set at most.

    Raises:
        CskvError: none of the data sets is there, or a file is another than it should be.
    """
    source = source or hub_archive("THUDM/LongBench", "data.zip")
    settings = json.loads(PROMPTS.read_text())["data_sets"]
    wanted = {f"{name}_e.jsonl": name for name in settings}
    questions = []
    for file, content in files(source):
        if (name := wanted.get(file)) is None:
            continue
        for row in json_rows(file, content, ("input", "context", "answers", "length"))[:cases]:
            prompt = settings[name]["prompt"].format(context=row["context"], input=row["input"])
            tokens, chat = settings[name]["answer_tokens"], settings[name]["chat"]
            judge = partial(score, name=name, answers=row["answers"])
            questions.append(Question(name, prompt, judge, tokens, chat, bucket(row["length"])))
    if not questions:
        raise CskvError(f"{source} holds none of {', '.join(wanted)}", "name the folder or archive they are in")
    return questions


def score(text: str, name: str, answers: Sequence[str]) -> float:
    """The best over the answers given: F1 of words, or ROUGE-L for the summaries of gov_report."""
    if name == "triviaqa":  # of which models write more examples after the answer
        text = text.lstrip("\n").split("\n")[0]
    if name == "gov_report":
        return max(rouge_l(text, answer) for answer in answers)
    return max(f1(words(text), words(answer)) for answer in answers)


def bucket(length: int) -> str:
    """Name of the benchmark's bucket for a text of so many words."""
    return next((name for limit, name in BUCKETS.items() if length < limit), "8k+")
