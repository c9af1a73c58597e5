"""LongEval's lines task (LongChat, github.com/DachengLi1/LongChat): which number stands in a line of a long record?"""

import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cskv_cli.evaluation.tasks.archive import files, json_rows
from cskv_cli.evaluation.tasks.generation import Question

ANSWER_TOKENS = 100
# The wording of longeval/utils.py.
HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
LINE = "line {}: REGISTER_CONTENT is <{}>\n"
QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {}? I need the number."
# The benchmark draws adjectives and nouns from another package; these are ours. 48 x 48 line names.
ADJECTIVES = """
able bright calm damp eager faint gentle harsh idle jolly keen loud merry narrow odd plain quick rapid shy tame
upset vivid warm young brave clean dull early fancy grand happy icy juicy kind lazy mild neat old proud quiet rough
silent tall ugly vague weak zesty blunt
""".split()  # noqa: SIM905
NOUNS = """
apple bridge candle desert engine forest garden hammer island jacket kettle ladder market needle ocean pencil quarry
river saddle tunnel umbrella valley window yard zebra anchor basket carpet dragon elbow feather glacier harbor
insect jungle kitchen lantern meadow nest orchard pillow rabbit shadow temple uncle violin wagon barrel
""".split()  # noqa: SIM905
MOST_LINES = len(ADJECTIVES) * len(NOUNS)


def generate(lines: Sequence[int], cases: int, seed: int) -> list[Question]:
    """`cases` records of each length; names of lines are adjective-noun pairs, contents 1 to 50000."""
    generator = random.Random(seed)
    return [_case(count, generator) for count in lines for _ in range(cases)]


def load(source: Path, cases: int | None) -> list[Question]:
    """Questions of the benchmark's own files, `*.jsonl` with `prompt` and `expected_number`.

    Args:
        cases: of each file at most.
    """
    return [
        _question(Path(name).stem, row["prompt"], int(row["expected_number"]))
        for name, content in files(source)
        if name.endswith(".jsonl")
        for row in json_rows(name, content, ("prompt", "expected_number"))[:cases]
    ]


def is_right(answer: str, number: int) -> float:
    """1 if the last number of the answer is it, else 0."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == number)


def _case(count: int, generator: random.Random) -> Question:
    pairs = generator.sample(range(MOST_LINES), count)
    names = [f"{ADJECTIVES[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in pairs]
    numbers = [generator.randint(1, 50_000) for _ in names]
    asked = generator.randrange(count)
    record = "".join(map(LINE.format, names, numbers))
    return _question(f"{count}_lines", HEADER + record + QUESTION.format(names[asked]), numbers[asked])


def _question(part: str, prompt: str, number: int) -> Question:
    return Question(part, prompt, partial(is_right, number=number), ANSWER_TOKENS)
