"""Documents from local files: plain text, json lines, parquet, each also gzipped, and folders of them."""

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cskv_cli.data.rows import cell_text, pick_column
from cskv_cli.errors import CskvError

_JSON = (".jsonl", ".json")
_PARQUET = (".parquet",)
_TEXT = (".txt", ".md", ".py", ".text", ".rst", ".csv")


def has_rows(path: Path) -> bool:
    """Whether the name says that the file has rows and columns; any other file is plain text."""
    return _suffix(path) in _JSON + _PARQUET


def is_known_suffix(path: Path) -> bool:
    """Whether a name is a file's, not a data set's."""
    return path.suffix == ".gz" or has_rows(path) or _suffix(path) in _TEXT


def file_documents(path: Path, column: str) -> Iterator[str]:
    """Yield a file's documents: its rows, or the whole of a plain text as one.

    Raises:
        CskvError: it cannot be read; the message names the line, row or byte.
    """
    with _readable(path):
        if _suffix(path) in _JSON:
            yield from _json_lines(path, column)
        elif _suffix(path) in _PARQUET:
            yield from _parquet_rows(path, column)
        else:
            yield _plain_text(path)


def folder_documents(folder: Path, column: str, shuffle: int | None) -> Iterator[str]:
    """Yield the documents of all files below a folder, by sorted path or, given a seed, in a random order.

    Hidden files and folders, binary files other than parquet and gzip, and .json that is not lines of objects are left
    out.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_hidden(path, folder)]
    if shuffle is not None:
        random.Random(shuffle).shuffle(files)
    for path in files:
        if not _is_foreign(path):
            yield from file_documents(path, column)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise CskvError(f"{path} cannot be read: {error}", "check the file and its permissions") from error


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _is_foreign(path: Path) -> bool:
    """Whether it is left out where it was not named itself: binary, or JSON that is no lines of objects."""
    if path.suffix == ".json":
        return not _begins_with_a_row(path)
    if path.suffix == ".gz" or has_rows(path):
        return False
    with _readable(path), path.open("rb") as file:
        return b"\0" in file.read(8192)


def _begins_with_a_row(path: Path) -> bool:
    with _readable(path), path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _plain_text(path: Path) -> str:
    with _open(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CskvError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}",
            f"convert it: iconv -f latin1 -t utf-8 {path}",
        ) from error


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CskvError(f"{where} is not JSON: {error}", "one JSON object per line is needed") from error
            if not isinstance(row, dict):
                raise CskvError(f"{where} is not a JSON object", 'each line is like {"text": "..."}')
            chosen = pick_column(row, column, where)
            yield cell_text(row[chosen], f"{where}, column {chosen!r},")


def _parquet_rows(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _open(path) as file:
            table = pyarrow.parquet.ParquetFile(file)
            chosen = pick_column(table.schema_arrow.names, column, str(path))
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[chosen]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield cell_text(value, f"{path} row {number}, column {chosen!r},")
    except pyarrow.ArrowException as error:
        raise CskvError(f"{path} is not a parquet file: {error}", "write it again, or give another file") from error
