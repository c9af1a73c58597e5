"""LV-Eval at 16k (arXiv 2402.05136, github.com/infinigence/LVEval): questions about texts mixed with others."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from cskv_cli.errors import CskvError
from cskv_cli.evaluation.tasks.archive import files, hub_archive, json_rows
from cskv_cli.evaluation.tasks.generation import Question
from cskv_cli.evaluation.tasks.metrics import chinese_words, f1, recall, rouge_l, words

PROMPTS = Path(__file__).parent / "prompts" / "lveval.json"
LENGTH = "16k"
LEAST_RECALL = {"en": 0.2, "zh": 0.4}  # of the keywords; an answer with less is wrong


def load(source: Path | None, cases: int | None) -> list[Question]:
    """Questions of `<data set>_16k.jsonl` in a folder or archive, or in the benchmark's archives on the Hub.

    Args:
        cases: of each data set at most.

    Raises:
        CskvError: none of the data sets is there, or a file is another than it should be.
    """
    data = json.loads(PROMPTS.read_text())
    settings, ignored = data["data_sets"], {name: text.split() for name, text in data["ignored_words"].items()}
    sources = [source] if source else [hub_archive("Infinigence/LVEval", f"{name}.zip") for name in settings]
    wanted = {f"{name}_{LENGTH}.jsonl": name for name in settings}
    questions = []
    for file, content in (pair for each in sources for pair in files(each)):
        if (name := wanted.get(file)) is None:
            continue
        for row in json_rows(file, content, ("input", "context", "answers"))[:cases]:
            setting = settings[name]
            prompt = setting["prompt"].format(context=row["context"], input=row["input"])
            judge = partial(score, setting=setting, ignored=ignored[setting["language"]], row=row)
            questions.append(Question(name, prompt, judge, setting["answer_tokens"]))
    if not questions:
        raise CskvError(f"{source} holds none of {', '.join(wanted)}", "name the folder or archive they are in")
    return questions


def score(text: str, setting: dict[str, Any], ignored: list[str], row: dict[str, Any]) -> float:
    """By the data set's metric, against the first answer alone, as the benchmark has it.

    `f1`: F1 of words · `keywords`: the same, but 0 where too few of the row's keywords are found ·
    `rouge`: ROUGE-L of the words that are not ignored.
    """
    language, metric, truth = setting["language"], setting["metric"], row["answers"][0]
    split = words if language == "en" else chinese_words
    answer, right = split(text), split(truth)
    if metric == "rouge":
        return rouge_l(*(" ".join(word for word in part if word not in ignored) for part in (answer, right)))
    keywords = row.get("answer_keywords") or (truth if language == "zh" else "")
    if metric == "keywords" and keywords and recall(answer, split(keywords), ignored) < LEAST_RECALL[language]:
        return 0.0
    return f1(answer, right)
