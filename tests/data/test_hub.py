import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets.exceptions import DatasetNotFoundError

from cskv_cli.data.sources import parse_source, read_documents
from cskv_cli.errors import CskvError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """One data set, o/n#c with a test split, served by the real library from a parquet file."""
    file = tmp_path / "x.parquet"
    rows = [{"text": "a", "body": "x"}, {"text": None, "body": "y"}, {"text": "b", "body": "z"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    real = datasets.load_dataset

    def load_dataset(path, config, *, split, streaming):
        assert (path, config, streaming) == ("o/n", "c", True)
        return real("parquet", data_files={"test": str(file)}, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def read(text):
    return list(read_documents(parse_source(text)))


def test_rows(hub):
    assert read("o/n#c:test") == ["a", "b"]
    assert read("o/n#c:test:body") == ["x", "y", "z"]


def test_no_such_column(hub):
    with pytest.raises(CskvError, match="o/n#c:test row 1: no column 'nope'; there is text, body"):
        read("o/n#c:test:nope")


def test_no_such_split(hub):
    with pytest.raises(CskvError, match="data set o/n#c:train cannot be read: .*split") as caught:
        read("o/n#c")
    assert caught.value.hint == "write owner/name#config:split:column"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (DatasetNotFoundError("Dataset 'o/n' doesn't exist on the Hub"), "spelling"),
        (RuntimeError("Dataset scripts are no longer supported, but found n.py"), "parquet"),
        (ConnectionError("Couldn't reach\n 'o/n' on the Hub"), "network"),
        (ValueError(), "owner/name#config"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_failures_are_one_line(monkeypatch, error, hint, late):
    def rows():
        yield {"text": "a"}
        raise error

    def load_dataset(*args, **kwargs):
        if late:
            return rows()
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(CskvError, match="data set o/n:train cannot be read: .") as caught:
        read("o/n")
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
