import subprocess
import sys

import pytest

from cskv_cli.data.sources import Source, parse_source, read_documents
from cskv_cli.errors import CskvError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("wiki.txt", "rows.jsonl", "a@0.5", "self", "builtin@2", "x:y"):
        (tmp_path / name).write_text("w1")
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wiki.txt", Source("file", "wiki.txt")),
        ("wiki.txt@0.25", Source("file", "wiki.txt", weight=0.25)),
        ("a@0.5", Source("file", "a@0.5")),
        ("a@0.5@3", Source("file", "a@0.5", weight=3.0)),
        ("x:y", Source("file", "x:y")),
        ("rows.jsonl:body", Source("file", "rows.jsonl", column="body")),
        ("rows.jsonl:body@2", Source("file", "rows.jsonl", weight=2.0, column="body")),
        ("self", Source("self", "self")),
        ("self@2", Source("self", "self", weight=2.0)),
        ("./self", Source("file", "./self")),
        ("builtin", Source("builtin", "builtin")),
        ("builtin@2", Source("file", "builtin@2")),
        ("owner", Source("folder", "owner")),
        ("owner/name", Source("folder", "owner/name")),
        ("owner:body", Source("folder", "owner", column="body")),
        ("ola13/small-the_pile", Source("hub", "ola13/small-the_pile")),
        ("o/n:test", Source("hub", "o/n", split="test")),
        ("o/n:test:body@0.5", Source("hub", "o/n", weight=0.5, split="test", column="body")),
        ("o/n#wikitext-2-raw-v1:test", Source("hub", "o/n#wikitext-2-raw-v1", split="test")),
    ],
)
def test_parse(here, text, expected):
    assert parse_source(text) == expected


@pytest.mark.parametrize(
    "text", ["", "nothing", "nothing@2", "data/typo.txt", "../o/n", "a/b/c", "o/n:", "o/n:a:b:c", "builtin:body"]
)
def test_names_nothing(here, text):
    with pytest.raises(CskvError, match="neither a file or folder here nor a data set id") as caught:
        parse_source(text)
    assert repr(text) in caught.value.message
    assert "owner/name" in caught.value.hint


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "half", ""])
def test_bad_weight(here, weight):
    with pytest.raises(CskvError, match=f"'wiki.txt@{weight}': '{weight}' is not a weight"):
        parse_source(f"wiki.txt@{weight}")


def test_column_of_plain_text(here):
    with pytest.raises(CskvError, match="wiki.txt is plain text: it has no column 'body'"):
        parse_source("wiki.txt:body")


@pytest.mark.parametrize("text", ["wiki.txt", "rows.jsonl:body", "self", "o/n", "o/n:test", "o/n:train:body"])
def test_label_reads_back(here, text):
    source = parse_source(text + "@2")
    assert source.label == text
    assert parse_source(source.label) == parse_source(text)


def test_parsing_is_light():
    heavy = "{'torch', 'transformers', 'datasets', 'pyarrow'}"
    code = f"import sys, cskv_cli.data.sources as s; s.parse_source('o/n'); assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_builtin_is_mixed_and_repeatable():
    documents = list(read_documents(parse_source("builtin")))
    assert documents == list(read_documents(parse_source("builtin")))
    long = [document for document in documents if len(document) > 100]
    assert len(set(long)) == len(long)
    start = "".join(documents)[:200_000]
    assert '"pdb" — The Python Debugger' in start
    assert "class ABCMeta(type)" in start
    assert sum(map(len, documents)) > 4_000_000


def test_what_is_evaluated_of_builtin_is_never_calibrated_on():
    parts = [list(read_documents(parse_source("builtin"), held_out=held_out)) for held_out in (False, True)]
    long = [{document for document in part if len(document) > 300} for part in parts]
    assert not long[0] & long[1]
    assert 9 < len(parts[0]) / len(parts[1]) < 10
    start = "".join(parts[1])[:100_000]
    assert "import" in start and "The Null Object" in start  # modules and topics
