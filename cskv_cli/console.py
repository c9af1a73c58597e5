"""The only way to the terminal: results on stdout, everything else on stderr, nothing needless where no one looks."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from cskv_cli.launch import is_main
from cskv_cli.progress import Advance, Progress


class TerminalProgress(Progress):
    """Progress bars on stderr."""

    @contextmanager
    def task(self, description: str, total: int, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit)
        columns += TimeRemainingColumn(), TextColumn("{task.fields[note]}")
        with Bars(*columns, console=RichConsole(stderr=True), transient=True) as bars:
            task = bars.add_task(description, total=total, note="")
            yield lambda steps, note="": bars.update(task, advance=steps, note=note)


class Console:
    """What a verb says; of several processes the first alone says anything, but for errors.

    Args:
        json: print one JSON object on stdout, and nothing else there.
    """

    def __init__(self, json: bool = False) -> None:
        self.json = json and is_main()
        self.chatty = sys.stdout.isatty() and not json and is_main()
        self._out = RichConsole(highlight=False, soft_wrap=not sys.stdout.isatty(), quiet=not is_main())
        self._err = RichConsole(stderr=True, highlight=False, soft_wrap=True)

    @property
    def progress(self) -> Progress:
        """Bars where a person looks, else silence."""
        return TerminalProgress() if self.chatty and sys.stderr.isatty() else Progress()

    def note(self, text: str) -> None:
        """Something good to know; only said to a person."""
        if self.chatty:
            self._err.print(text, style="dim", markup=False)

    def warn(self, text: str) -> None:
        """Something that may be wrong."""
        if is_main():
            self._err.print(f"warning: {text}", style="yellow", markup=False)

    def fail(self, message: str, hint: str) -> None:
        """The last words of a verb that failed."""
        self._err.print(f"error: {message}", style="red", markup=False)
        if hint:
            self._err.print(f"  {hint}", markup=False)

    def line(self, text: str = "") -> None:
        """A line of the result."""
        if not self.json:
            self._out.print(text, markup=False)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], texts: int = 1) -> None:
        """A table of the result; the first `texts` columns are text, the others are numbers."""
        if self.json:
            return
        self._out.print(title, markup=False, soft_wrap=True)
        table = Table(box=None, pad_edge=False, header_style="")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < texts else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(str, row))
        self._out.print(table)

    def result(self, content: dict[str, Any]) -> None:
        """The whole result, for --json."""
        if self.json:
            print(json.dumps(_finite(content), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """With null for what is no finite number: JSON knows no other."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
