"""What `--data` may name, and the documents behind a name."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cskv_cli.data.files import file_documents, folder_documents, has_rows, is_known_suffix
from cskv_cli.errors import CskvError

FORMS = "give a file, a folder, owner/name[#config][:split[:column]], self or builtin; @WEIGHT may follow"

_WEIGHTED = re.compile(r"(?P<rest>.+)@(?P<weight>[^/@:]*)")
_HUB = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*(?:#[^:@]+)?)(?::(?P<split>[^:@]+)(?::(?P<column>[^:@]+))?)?")


@dataclass(frozen=True)
class Source:
    """One place text comes from.

    `name` is a path, or a Hub id with its `#config`; `split` is for the Hub only; `column` is the one to read where
    the data has columns (rows without a `text` column are read from their `messages`).
    """

    kind: Literal["file", "folder", "hub", "self", "builtin"]
    name: str
    weight: float = 1.0
    split: str = "train"
    column: str = "text"

    @property
    def label(self) -> str:
        """What the user typed, without the weight and without defaults."""
        column = "" if self.column == "text" else f":{self.column}"
        split = f":{self.split}" if self.kind == "hub" and (column or self.split != "train") else ""
        return self.name + split + column


def parse_source(text: str) -> Source:
    """Read one `--data` argument. An existing path wins over any other reading, except `self` and `builtin`.

    Raises:
        CskvError: it names nothing, or its weight is not a positive number.
    """
    match = _WEIGHTED.fullmatch(text)
    if match and not _local(text):
        if source := _unweighted(match["rest"]):
            return replace(source, weight=_weight(match["weight"], text))
    elif source := _unweighted(text):
        return source
    raise CskvError(f"{text!r} is neither a file or folder here nor a data set id", FORMS)


def with_absolute_path(text: str) -> str:
    """The same `--data` argument, right from any working directory.

    Raises:
        CskvError: as `parse_source`.
    """
    source = parse_source(text)
    if source.kind not in ("file", "folder"):
        return text
    return str(Path(source.name).expanduser().absolute()) + text.removeprefix(source.name)


def read_documents(source: Source, *, shuffle: int | None = None, held_out: bool = False) -> Iterator[str]:
    """Yield the documents of a source other than `self`, one by one, blank ones left out.

    Args:
        shuffle: a seed for the order in which a folder's files are read, so that its beginning is a fair sample;
            None for their sorted order.
        held_out: of `builtin`, the part for evaluation.

    Raises:
        CskvError: a file, row or data set cannot be read, or there is no text at all.
    """
    found = False
    for document in _raw_documents(source, shuffle, held_out):
        if document.strip():
            found = True
            yield document
    if not found:
        raise CskvError(f"{source.label} holds no text", "remove it, or check that this is the file you meant")


def _raw_documents(source: Source, shuffle: int | None, held_out: bool) -> Iterator[str]:
    match source.kind:
        case "file":
            return file_documents(Path(source.name), source.column)
        case "folder":
            return folder_documents(Path(source.name), source.column, shuffle)
        case "hub":
            from cskv_cli.data.hub import hub_documents

            return hub_documents(source.name, source.split, source.column)
        case "builtin":
            from cskv_cli.data.builtin import builtin_documents

            return builtin_documents(held_out)
    raise ValueError(f"a {source.kind!r} source has no documents")


def _unweighted(text: str) -> Source | None:
    if text in ("self", "builtin"):
        return Source(text, text)
    if local := _local(text):
        return local
    head, _, column = text.rpartition(":")
    if column and (local := _local(head)):
        if local.kind == "file" and not has_rows(Path(head)):
            raise CskvError(f"{head} is plain text: it has no column {column!r}", f"give {head} alone")
        return replace(local, column=column)
    match = _HUB.fullmatch(text)
    if match is None or is_known_suffix(Path(match["name"])):
        return None
    return Source("hub", match["name"], split=match["split"] or "train", column=match["column"] or "text")


def _local(text: str) -> Source | None:
    path = Path(text)
    if not text or not path.exists():  # Path("") is the working folder
        return None
    return Source("folder" if path.is_dir() else "file", text)


def _weight(text: str, argument: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise CskvError(f"{argument!r}: {text!r} is not a weight", "a weight is a positive number: wiki.txt@0.5")
    return weight
