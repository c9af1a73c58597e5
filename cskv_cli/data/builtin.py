"""Text that every Python installation carries: the help topics (English) and the standard library's sources."""

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

HELD_OUT = 10  # the last of so many topics and modules are evaluated on, and never calibrated on

# Tests, tables of characters, the topics themselves, and other people's or machine-written code.
_LEFT_OUT = {"test", "idlelib", "lib2to3", "encodings", "pydoc_data", "ensurepip", "turtledemo"}


def builtin_documents(held_out: bool = False) -> Iterator[str]:
    """Yield topics and modules so that each has about half of the characters, for as long as both last.

    Args:
        held_out: the part for evaluation instead of the part for calibration and training.
    """
    modules = (path.read_text(encoding="utf-8") for path in _part(_modules(), held_out))
    rest = [iter(_part(_topics(), held_out)), modules]
    lengths = [0, 0]
    while rest:
        least = lengths.index(min(lengths))
        document = next(rest[least], None)
        if document is None:
            del rest[least], lengths[least]
        else:
            lengths[least] += len(document)
            yield document


def _part(items: Sequence[Item], held_out: bool) -> Sequence[Item]:
    first = len(items) - len(items) // HELD_OUT
    return items[first:] if held_out else items[:first]


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return sorted(set(topics.values()))


def _modules() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if not name.startswith("_"):
            module = library / f"{name}.py"
            found += [module] if module.is_file() else sorted((library / name).rglob("*.py"))
    return [path for path in found if not {"test", "tests"} & set(path.relative_to(library).parts)]
