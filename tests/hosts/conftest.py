"""One tiny export at full rank and one at low rank, with a chat template."""

from types import SimpleNamespace

import pytest

from tests.cli import compress
from tests.families import write_tiny

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
SMALL_CACHE = "--window", 4, "--sinks", 2


@pytest.fixture(scope="session")
def exports(tmp_path_factory, tokenizer, text):
    """Folders: the base, an export of it at full rank, and one at low rank in 4 bits."""
    folder = tmp_path_factory.mktemp("hosts")
    write_tiny(folder, tokenizer, text)
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    compress(folder, "--rank-k", 32, "--rank-v", 32, *SMALL_CACHE, "--out", folder / "full")
    compress(folder, "--rank-k", 5, "--rank-v", 5, *SMALL_CACHE, "--bits", 4, "--group", 4, "--out", folder / "low")
    return SimpleNamespace(base=folder / "base", full=folder / "full", low=folder / "low")


@pytest.fixture(autouse=True)
def own_modules(modules):
    """All tests here load code of checkpoints."""
