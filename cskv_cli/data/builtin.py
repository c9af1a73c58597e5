"""Text that every Python installation carries: the help topics (English) and the standard library's sources."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests, tables of characters, the topics themselves, and other people's or machine-written code.
_LEFT_OUT = {"test", "idlelib", "lib2to3", "encodings", "pydoc_data", "ensurepip", "turtledemo"}


def builtin_documents() -> Iterator[str]:
    """Yield topics and modules so that each has about half of the characters, for as long as both last."""
    rest = [_topics(), _modules()]
    lengths = [0, 0]
    while rest:
        least = lengths.index(min(lengths))
        document = next(rest[least], None)
        if document is None:
            del rest[least], lengths[least]
        else:
            lengths[least] += len(document)
            yield document


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    return iter(sorted(set(topics.values())))


def _modules() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if name.startswith("_"):
            continue
        module = library / f"{name}.py"
        for path in [module] if module.is_file() else sorted((library / name).rglob("*.py")):
            if not {"test", "tests"} & set(path.relative_to(library).parts):
                yield path.read_text(encoding="utf-8")
