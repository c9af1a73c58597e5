"""How a stage tells of long work without printing: it opens tasks on the `Progress` it is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Called with the number of steps just done, and what else a person may want to see beside the bar."""

    def __call__(self, steps: int, note: str = "") -> None: ...


class Progress:
    """Says nothing; `console.TerminalProgress` draws bars."""

    @contextmanager
    def task(self, description: str, total: int, unit: str = "") -> Iterator[Advance]:
        """A piece of work of `total` steps; call what is yielded with the number of steps just done."""
        yield lambda steps, note="": None


SILENT = Progress()
