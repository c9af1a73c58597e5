"""LongEval, LongBench-E and LV-Eval: their files, prompts and scores."""

import json
import re
import tarfile
import zipfile

import pytest

from cskv_cli.errors import CskvError
from cskv_cli.evaluation.tasks import archive, longbench, longeval, lveval


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")


def packed(folder):
    """The same files as a .zip and as a .tar, one level down."""
    zipped, tarred = folder.with_suffix(".zip"), folder.with_suffix(".tar")
    with zipfile.ZipFile(zipped, "w") as target:
        for path in folder.iterdir():
            target.write(path, f"data/{path.name}")
    with tarfile.open(tarred, "w") as target:
        target.add(folder, "data")
    return zipped, tarred


def asked(question):
    return question.part, question.prompt, question.answer_tokens, question.chat, question.bucket


# LongEval

RECORD = """Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains \
a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding \
<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of a \
certain line index. Now the record start:

line torpid-kid: REGISTER_CONTENT is <24169>
line lean-witch: REGISTER_CONTENT is <333>

Now the record is over. Tell me what is the <REGISTER_CONTENT> in line lean-witch? I need the number."""


def test_a_generated_record_has_the_benchmarks_wording_and_asks_for_a_line_of_it():
    questions = longeval.generate([2, 30], 20, seed=0)
    assert [q.part for q in questions] == ["2_lines"] * 20 + ["30_lines"] * 20
    for question in questions:
        lines = dict(re.findall(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", question.prompt, re.MULTILINE))
        name = re.search(r"in line (\S+)\? I need", question.prompt)[1]
        assert len(lines) == int(question.part.split("_")[0])
        assert question.score(f"is <{lines[name]}>.") == 1 and question.score(f"is <{lines[name]}0>.") == 0
    prompt = questions[0].prompt
    for old, new in zip(re.findall(r"line (\w+-\w+):", prompt), ("torpid-kid", "lean-witch"), strict=True):
        prompt = prompt.replace(old, new)
    for old, new in zip(re.findall(r"is <(\d+)>\n", prompt), ("24169", "333"), strict=True):
        prompt = prompt.replace(f"<{old}>", f"<{new}>")
    assert prompt in (RECORD, RECORD.replace("line lean-witch?", "line torpid-kid?"))
    assert longeval.generate([30], 3, seed=1) != longeval.generate([30], 3, seed=2)


@pytest.mark.parametrize(
    "answer, number, score",
    [  # the first three from predictions that the benchmark's authors published, with how they counted them
        ("The <REGISTER\\_CONTENT> in line torpid-kid is <2416>.", 2416, 1),
        ("The <REGISTER\\_CONTENT> in line filthy-eternity is <8763>.", 7156, 0),
        ("The <REGISTER\\_CONTENT> in line sleepy-bijou is <333>.", 333, 1),
        ("line 12 holds 333", 333, 1),
        ("333 is in line 12", 333, 0),
        ("0333", 333, 1),
        ("none", 333, 0),
    ],
)
def test_the_last_number_counts(answer, number, score):
    assert longeval.is_right(answer, number) == score


def test_the_benchmarks_own_cases_are_read(tmp_path):
    row = {"random_idx": ["lean-witch", 1], "expected_number": 333, "num_lines": 2, "prompt": RECORD}
    write(tmp_path / "cases", "200_lines.jsonl", [row] * 3)
    for source in (tmp_path / "cases", tmp_path / "cases" / "200_lines.jsonl", *packed(tmp_path / "cases")):
        questions = longeval.load(source, None)
        assert [asked(q) for q in questions] == [("200_lines", RECORD, 100, True, "")] * 3
        assert questions[0].score("<333>") == 1
    assert len(longeval.load(tmp_path / "cases", 2)) == 2


# LongBench-E


def longbench_row(length, **more):
    return {"input": "Who?", "context": "Some {text}.", "answers": ["Ann", "Bob"], "length": length} | more


@pytest.fixture
def longbench_folder(tmp_path):
    folder = tmp_path / "longbench"
    write(folder, "qasper_e.jsonl", [longbench_row(n) for n in (3999, 4000, 7999, 8000)])
    write(folder, "triviaqa_e.jsonl", [longbench_row(1)])
    write(folder, "qasper.jsonl", [longbench_row(1)])
    write(folder, "lcc_e.jsonl", [longbench_row(1)])
    return folder


def test_longbench_rows_become_its_prompts(longbench_folder):
    expected = [asked(q) for q in longbench.load(longbench_folder, None)]
    assert [(part, bucket) for part, *_, bucket in expected] == [
        ("qasper", "0-4k"),
        ("qasper", "4-8k"),
        ("qasper", "4-8k"),
        ("qasper", "8k+"),
        ("triviaqa", "0-4k"),
    ]
    assert expected[0][1].startswith("You are given a scientific article and a question. Answer")
    assert expected[0][1].endswith("\n\nQuestion: Who?\n\nAnswer:") and "Article: Some {text}.\n\n" in expected[0][1]
    assert expected[0][2:4] == (128, True) and expected[4][2:4] == (32, False)
    for source in packed(longbench_folder):
        assert [asked(q) for q in longbench.load(source, None)] == expected
    assert len(longbench.load(longbench_folder, 1)) == 2


def test_longbench_scores():
    assert longbench.score("It was Bob", "qasper", ["Ann", "Bob"]) == pytest.approx(0.5)
    assert longbench.score("\n\nBob\nQuestion: Who?\nAnn", "triviaqa", ["Bob"]) == 1
    assert longbench.score("Bob\nAnn", "hotpotqa", ["Bob"]) == pytest.approx(2 / 3)
    summary = longbench.score("cat lies down", "gov_report", ["dog", "cat sat right down"])
    assert summary == pytest.approx(4 / 7)


def test_without_a_path_the_archive_on_the_hub_is_read(longbench_folder, monkeypatch):
    zipped, _ = packed(longbench_folder)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: fetched(zipped, *args, **kwargs))
    local = longbench.load(longbench_folder, None)
    assert [asked(q) for q in longbench.load(None, None)] == [asked(q) for q in local]


def fetched(path, repository, file, repo_type):
    assert (repository, file, repo_type) == ("THUDM/LongBench", "data.zip", "dataset")
    return str(path)


def test_what_is_wrong_with_the_files_is_said(tmp_path, longbench_folder):
    with pytest.raises(CskvError, match="holds none of qasper_e.jsonl"):
        (tmp_path / "empty").mkdir()
        longbench.load(tmp_path / "empty", None)
    (longbench_folder / "qasper_e.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(CskvError, match="qasper_e.jsonl line 1 has no 'context'"):
        longbench.load(longbench_folder, None)
    (longbench_folder / "qasper_e.jsonl").write_text("\n{\n")
    with pytest.raises(CskvError, match="qasper_e.jsonl line 2 is not JSON"):
        longbench.load(longbench_folder, None)
    with pytest.raises(CskvError, match="nothing.zip cannot be read"):
        longbench.load(tmp_path / "nothing.zip", None)


def test_no_network_is_one_clear_line():
    with pytest.raises(CskvError, match="data.zip of data set THUDM/LongBench") as caught:
        archive.hub_archive("THUDM/LongBench", "data.zip")  # tests are offline
    assert "--task NAME:PATH" in caught.value.hint


# LV-Eval

SETTINGS = json.loads(lveval.PROMPTS.read_text())["data_sets"]
IGNORED = {name: text.split() for name, text in json.loads(lveval.PROMPTS.read_text())["ignored_words"].items()}


def lv(answer, name, **row):
    setting = SETTINGS[name]
    return lveval.score(answer, setting, IGNORED[setting["language"]], row)


def test_lveval_scores():
    truth = ["Mary Smith of London", "never read"]
    assert lv("Mary Smith", "factrecall_en", answers=truth) == pytest.approx(2 * 2 / 6)
    assert lv("never read", "factrecall_en", answers=truth) == 0  # the first answer alone counts
    # of the five keywords one is found: just enough
    assert lv("Mary", "hotpotwikiqa_mixup", answers=truth, answer_keywords="Mary Smith x y z") == pytest.approx(2 / 5)
    assert lv("Mary", "hotpotwikiqa_mixup", answers=truth, answer_keywords="Mary Smith x y z v") == 0
    # an ignored word is not found
    assert lv("London and", "hotpotwikiqa_mixup", answers=truth, answer_keywords="and Smith") == 0
    assert lv("Mary", "hotpotwikiqa_mixup", answers=truth) == pytest.approx(2 / 5)


def test_lveval_scores_in_chinese():
    truth = ["北京 上海 广州 深圳 天津"]
    assert lv("北京，上海", "cmrc_mixup", answers=truth) == pytest.approx(2 * 2 / 7)
    assert lv("北京", "cmrc_mixup", answers=truth) == 0  # without keywords the answer has them, 0.4 of them are needed
    assert lv("北京", "factrecall_zh", answers=truth) == pytest.approx(2 / 6)
    assert lv("北京是的", "dureader_mixup", answers=["北京"]) == pytest.approx(1)  # ignored words do not count


def test_lveval_rows_become_its_prompts(tmp_path):
    row = {"input": "Who?", "context": "Some text.", "answers": ["Ann"], "answer_keywords": "Ann", "length": 9}
    write(tmp_path / "lveval", "factrecall_en_16k.jsonl", [row])
    write(tmp_path / "lveval", "factrecall_en_32k.jsonl", [row])
    write(tmp_path / "lveval", "cmrc_mixup_16k.jsonl", [row] * 2)
    expected = [asked(q) for q in lveval.load(tmp_path / "lveval", None)]
    assert [part for part, *_ in expected] == ["cmrc_mixup"] * 2 + ["factrecall_en"]
    assert expected[2][1:3] == (
        "Please answer the following questions based on the given article.\n\nArticle: Some text.\n\nPlease answer the "
        "following questions based on the above article.\n\nQuestion: Who?\nAnswer:",
        16,
    )
    for source in packed(tmp_path / "lveval"):
        assert [asked(q) for q in lveval.load(source, None)] == expected
    assert lveval.load(tmp_path / "lveval", 1)[1].score("Ann") == 1
