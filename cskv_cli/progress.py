"""How a stage tells of long work without printing: it opens tasks on the `Progress` it is given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


class Progress:
    """Says nothing; `console.TerminalProgress` draws bars."""

    @contextmanager
    def task(self, description: str, total: int, unit: str = "") -> Iterator[Advance]:
        """A piece of work of `total` steps; call what is yielded with the number of steps just done."""
        yield lambda steps: None


SILENT = Progress()
