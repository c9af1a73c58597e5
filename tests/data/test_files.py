import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from cskv_cli.data.sources import parse_source, read_documents
from cskv_cli.errors import CskvError

TEXTS = ["one\nline", "  zwei — 三\r\n", "three"]


def read(path, column=""):
    return list(read_documents(parse_source(f"{path}{column}")))


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def gzipped(path):
    target = path.with_name(path.name + ".gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    return target


def test_same_documents_in_every_form(tmp_path):
    rows = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    for name, text in zip(["a.md", "b/a.txt", "c"], TEXTS, strict=True):
        (folder / name).write_bytes(text.encode())
    jsonl = write_jsonl(tmp_path / "x.jsonl", rows)
    parquet = write_parquet(tmp_path / "x.parquet", rows)
    for path in (folder, jsonl, gzipped(jsonl), parquet, gzipped(parquet)):
        assert read(path) == TEXTS, path


def test_plain_text_is_one_document(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfa\n\nb\n")
    assert read(path) == read(gzipped(path)) == ["a\n\nb\n"]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_columns_and_chat(tmp_path, write):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"content": None}]
    path = write(
        tmp_path / f"x.{write.__name__[6:]}", [{"messages": chat, "body": "b"}, {"messages": [], "body": None}]
    )
    assert read(path) == read(path, ":messages") == ["hi\n\nho"]
    assert read(path, ":body") == ["b"]
    with pytest.raises(CskvError, match=r"no column 'boody'; there is messages, body") as caught:
        read(path, ":boody")
    assert str(path) in caught.value.message


def test_chat_in_parts(tmp_path):
    parts = [{"type": "text", "text": "look"}, {"type": "image", "url": "x"}, {"type": "text", "text": "here"}]
    assert read(write_jsonl(tmp_path / "x.json", [{"messages": [{"content": parts}]}])) == ["look\n\nhere"]


def test_folder_leaves_out_hidden_binary_and_empty(tmp_path):
    for name in (".hidden", ".git/config", "kept.py", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\xff")
    assert read(tmp_path) == ["kept.py"]


def test_folder_order(tmp_path):
    for n in range(20):
        (tmp_path / f"{n:02}").write_text(f"{n:02}")
    in_order = [f"{n:02}" for n in range(20)]
    source = parse_source(str(tmp_path))
    shuffled = list(read_documents(source, shuffle=3))
    assert read(tmp_path) == in_order
    assert shuffled == list(read_documents(source, shuffle=3)) != in_order
    assert shuffled != list(read_documents(source, shuffle=4))
    assert sorted(shuffled) == in_order


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.txt", b"abc\xff", r"x.txt is not UTF-8 text: byte 0xff at offset 3"),
        ("x.txt", b" \n", r"x.txt holds no text"),
        ("x.jsonl", b"", r"x.jsonl holds no text"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', r"x.jsonl line 3 is not JSON"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"x.jsonl line 2 is not JSON"),
        ("x.jsonl", b'["a"]', r"x.jsonl line 1 is not a JSON object"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": "b", "id": 1}', r"x.jsonl line 2: no column 'text'; there is txt, id"),
        ("x.jsonl", b'{"text": 7}', r"x.jsonl line 1, column 'text', holds int, not text"),
        ("x.parquet", b"not parquet", r"x.parquet is not a parquet file"),
        ("x.parquet", b"", r"x.parquet is not a parquet file"),
        ("x.txt.gz", b"not gzip", r"x.txt.gz cannot be read"),
        ("x.txt.gz", gzip.compress(random.Random(0).randbytes(999))[:500], r"x.txt.gz cannot be read"),
    ],
)
def test_errors_name_the_place(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CskvError, match=message) as caught:
        read(tmp_path / name)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_folder_leaves_out_json_that_is_no_lines(tmp_path):
    row = json.dumps({"text": "a row"})
    files = {"a.json": row, "b.json": json.dumps({"$schema": {}, "type": "object"}, indent=2), "c.json": '["x"]\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert list(read_documents(parse_source(str(tmp_path)))) == ["a row"]
    with pytest.raises(CskvError, match=r"b\.json line 1 is not JSON"):  # named itself it is read, or refused
        list(read_documents(parse_source(str(tmp_path / "b.json"))))


def test_the_documentation_of_this_project_is_a_folder_of_text():  # `make demo` scores it
    documents = list(read_documents(parse_source(str(Path(__file__).parents[2] / "docs"))))
    assert len(documents) > 10 and not any(document.startswith("{") for document in documents)
