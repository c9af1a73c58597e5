"""Measurements on disk, each as soon as it is made."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Results by key, in a file of JSON lines; a line that a kill cut short counts as not there.

    Args:
        path: the file, appended to.
        identity: what the results depend on, beside their keys; a file of another identity is begun anew.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path, self._identity = path, identity
        self._results = dict(read(path, identity))
        if not self._results:
            path.write_text(json.dumps(["identity", identity]) + "\n")
        elif not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:
                file.write("\n")
        self.made = 0

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The result of a key, measured unless it is there."""
        if key not in self._results:
            self._results[key] = measure()
            self.made += 1
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._results[key]]) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return self._results[key]


def read(path: Path, identity: str) -> list[tuple[str, Any]]:
    """The whole lines of a journal, if it is of this identity."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            key, value = json.loads(line)
        except (ValueError, TypeError):
            continue
        entries.append((key, value))
    return entries[1:] if entries[:1] == [("identity", identity)] else []
