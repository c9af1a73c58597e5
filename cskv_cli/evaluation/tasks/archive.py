"""Rows of a benchmark's files: from a folder, an archive, one file, or an archive on the Hub."""

import json
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from cskv_cli.errors import CskvError

Row = dict[str, Any]


def files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of a folder, a .zip or .tar archive, or of a single file.

    Raises:
        CskvError: it is not there or cannot be read.
    """
    try:
        if source.is_dir():
            for path in sorted(source.rglob("*")):
                if path.is_file():
                    yield path.name, path.read_bytes()
        elif zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                for name in sorted(archive.namelist()):
                    if not name.endswith("/"):
                        yield PurePosixPath(name).name, archive.read(name)
        elif tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                for member in archive:
                    if member.isfile():
                        yield PurePosixPath(member.name).name, archive.extractfile(member).read()
        else:
            yield source.name, source.read_bytes()
    except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise CskvError(f"{source} cannot be read: {error}", "name a folder or an archive of the benchmark") from error


def json_rows(name: str, content: bytes, needed: tuple[str, ...]) -> list[Row]:
    """The rows of a .jsonl file.

    Raises:
        CskvError: a line is not an object with all that is needed.
    """
    rows = []
    for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CskvError(f"{name} line {number} is not JSON: {error}", "give the benchmark's own file") from error
        if lacking := [key for key in needed if not isinstance(row, dict) or key not in row]:
            raise CskvError(f"{name} line {number} has no {lacking[0]!r}", "give the benchmark's own file")
        rows.append(row)
    return rows


def hub_archive(repository: str, file: str) -> Path:
    """An archive of a data set on the Hub; its own loading script, if it has one, is not run.

    Raises:
        CskvError: it cannot be had.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CskvError(
            f"{file} of data set {repository} cannot be downloaded: {reason}",
            "connect, or give a local copy behind a colon: --task NAME:PATH",
        ) from error
