"""The text in a row of a jsonl file, a parquet file or a Hub data set."""

from collections.abc import Iterable, Mapping
from typing import Any

from cskv_cli.errors import CskvError


def pick_column(columns: Iterable[str], wanted: str, where: str) -> str:
    """Return the column to read: the wanted one, or `messages` where `text` was wanted and only chat is there.

    Raises:
        CskvError: there is no such column; the message lists those there are.
    """
    columns = list(columns)
    if wanted in columns:
        return wanted
    if wanted == "text" and "messages" in columns:
        return "messages"
    raise CskvError(
        f"{where}: no column {wanted!r}; there is {', '.join(columns) or 'none'}",
        "name the column after a colon: file.jsonl:COLUMN or owner/name:SPLIT:COLUMN",
    )


def cell_text(value: Any, where: str) -> str:
    """Return a cell's text; a list of chat messages is joined by blank lines, an absent value is empty.

    Raises:
        CskvError: the cell holds something else.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        return "\n\n".join(filter(None, (_message_text(message, where) for message in value)))
    raise CskvError(f"{where} holds {type(value).__name__}, not text", "name a column of text or of chat messages")


def _message_text(message: Mapping[str, Any], where: str) -> str:
    if "content" in message:
        return cell_text(message["content"], where)
    # A part of a message: {"type": "text", "text": ...}, or an image, which has no text.
    text = message.get("text")
    return text if isinstance(text, str) else ""
