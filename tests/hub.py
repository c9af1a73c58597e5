"""The local Hub, put in the place of the real one for this process or for another."""

import os
import time
from contextlib import contextmanager

from huggingface_hub import constants

from tests.fakehub import WRITER, FakeHub


@contextmanager
def local_hub(monkeypatch, tmp_path):
    """A `FakeHub` that huggingface_hub talks to in this process; what would be slept is in `hub.waits` instead."""
    with FakeHub() as hub:
        values = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
        }
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        hub.waits = []
        monkeypatch.setattr(time, "sleep", hub.waits.append)
        yield hub


def environment(hub, home, **more):
    """Variables of a process that is to talk to this Hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "CSKV_"))}
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITER}
    return kept | ours | {"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"} | more
