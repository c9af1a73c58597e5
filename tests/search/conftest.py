"""A simulator of a tiny model in float64, and windows to measure on."""

import pytest
import torch

from cskv_cli.checkpoint.base import resolve_base
from cskv_cli.data.recall import Window
from cskv_cli.memory import Shape
from cskv_cli.search.options import Frame
from cskv_cli.search.simulator import Simulator
from cskv_cli.statistics import Collector, save_layer
from tests.families import base_model

TOKENS = 41


@pytest.fixture
def make_simulator(tmp_path):
    """(simulator, base model) of a family; the Grams are of random inputs."""

    def make(family, window=8, sinks=2, group=4, layers=(0, 1, 2, 3)):
        base = base_model(family)
        base.save_pretrained(tmp_path / "base")
        (tmp_path / "calibrate").mkdir()
        for i in layers:
            collector = Collector(1)
            collector.add(0, torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(i)))
            save_layer(tmp_path / "calibrate", i, collector.result())
        frame = Frame(Shape(32, 2), tuple(layers), 4, window, sinks, group, tokens=8192)
        resolved = resolve_base(str(tmp_path / "base"), revision=None, work_dir=tmp_path)
        return Simulator(resolved, frame, tmp_path / "calibrate", torch.float64, "cpu"), base.double()

    return make


@pytest.fixture
def windows():
    """One of plain text, one with a prefill whose end is scored."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 97, (2, TOKENS), generator=generator)
    scored = torch.arange(TOKENS - 1) >= 30
    return [Window(ids[0], 0, torch.ones(TOKENS - 1, dtype=torch.bool)), Window(ids[1], 20, scored)]
