"""Documents of a data set on the Hugging Face Hub, streamed."""

from collections.abc import Iterator

from cskv_cli.data.rows import cell_text, pick_column
from cskv_cli.errors import CskvError


def hub_documents(name: str, split: str, column: str) -> Iterator[str]:
    """Yield the text of each row of `owner/name[#config]`.

    Raises:
        CskvError: whatever keeps the data set from being read, in one line.
    """
    import datasets

    path, _, config = name.partition("#")
    try:
        rows = datasets.load_dataset(path, config or None, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            where = f"{name}:{split} row {number}"
            chosen = pick_column(row, column, where)
            yield cell_text(row[chosen], f"{where}, column {chosen!r},")
    except CskvError:
        raise
    # The library raises its own errors and those of four others: all mean that the data cannot be had.
    except Exception as error:
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise CskvError(f"data set {name}:{split} cannot be read: {cause}", _hint(error)) from error


def _hint(error: Exception) -> str:
    from datasets.exceptions import DatasetNotFoundError

    if isinstance(error, DatasetNotFoundError):
        return "check the spelling (no local file has this name either); a private one needs `hf auth login`"
    if "scripts are no longer supported" in str(error):
        return "it needs code to be run: choose a copy of it in parquet, or give a local file"
    if isinstance(error, ValueError):
        return "write owner/name#config:split:column"
    return "check the network, or give a local file; `self` and `builtin` need no download"
