"""Figures: what they show, and that nothing but that decides their bytes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib import rcParams
from matplotlib.figure import Figure
from PIL import Image

from cskv_cli.plots import plot_energy, plot_ranks, plot_spectrum
from cskv_cli.spectrum import Spectrum


def decaying(rate: float, channels: int = 16) -> Spectrum:
    return Spectrum(torch.logspace(0, -rate, channels, dtype=torch.float64))


def spectra(layers: int = 3) -> dict[int, dict[str, Spectrum]]:
    return {2 * i: {"k": decaying(3 + i / 10), "v": decaying(1 + i / 10)} for i in range(layers)}


PLOTS = {
    "spectrum": lambda path, given: plot_spectrum(path, next(iter(given)), next(iter(given.values()))),
    "energy": plot_energy,
    "ranks": plot_ranks,
}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The figure that a plot would write."""

    def draw(name: str, given) -> Figure:
        figures = []
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
            PLOTS[name](tmp_path / "unused.png", given)
        return figures[0]

    return draw


@pytest.mark.parametrize("name", PLOTS)
def test_bytes_are_the_same_each_time_whatever_the_user_has_set(name, tmp_path, monkeypatch):
    PLOTS[name](tmp_path / "1.png", spectra())
    monkeypatch.setitem(rcParams, "font.size", 20)
    monkeypatch.setitem(rcParams, "axes.facecolor", "red")
    PLOTS[name](tmp_path / "2.png", spectra())
    first, second = ((tmp_path / f"{i}.png").read_bytes() for i in (1, 2))
    assert first == second
    assert b"tEXt" not in first
    assert rcParams["font.size"] == 20


@pytest.mark.parametrize("name", PLOTS)
def test_a_page_of_text_width_with_something_on_it(name, tmp_path):
    PLOTS[name](tmp_path / "plot.png", spectra())
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width == 1300
        assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        dark = sum(image.convert("L").histogram()[:128])
    assert dark > 3000


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize(
    "given",
    [
        spectra(1),
        spectra(100),
        {0: {"k": Spectrum(torch.zeros(4, dtype=torch.float64)), "v": decaying(20, 4)}},
        {0: {"k": decaying(1, 1), "v": decaying(1, 1)}},
    ],
    ids=["one layer", "100 layers", "all zero", "one channel"],
)
def test_odd_spectra_draw_without_a_warning(name, given, tmp_path, recwarn):
    PLOTS[name](tmp_path / "plot.png", given)
    assert not recwarn.list


def test_spectrum_marks_the_ranks_of_each_cache(drawn):
    pair = spectra()[0]
    for ax, cache in zip(drawn("spectrum", spectra()).axes, pair.values(), strict=True):
        shown = [text.get_text() for text in ax.get_legend().get_texts()]
        assert shown == [f"{percent} %: rank {cache.rank_for(percent / 100)}" for percent in (90, 95, 99)]
        curve = next(line for line in ax.lines if len(line.get_xdata()) > 1)
        assert list(curve.get_ydata()) == (cache.singular_values / cache.singular_values[0]).tolist()
        for line in [line for line in ax.lines if len(line.get_xdata()) == 1]:
            assert line.get_ydata()[0] == curve.get_ydata()[int(line.get_xdata()[0]) - 1]


def test_energy_has_a_curve_per_layer_from_nothing_to_all(drawn):
    given = spectra()
    for name, ax in zip("kv", drawn("energy", given).axes[:2], strict=True):
        curves = [line for line in ax.lines if len(line.get_xdata()) > 2]
        for curve, pair in zip(curves, given.values(), strict=True):
            assert (curve.get_xdata()[0], curve.get_xdata()[-1]) == (0, 100)
            kept = torch.tensor([0, *pair[name].energy.tolist()], dtype=torch.float64)
            torch.testing.assert_close(1 - torch.tensor(curve.get_ydata(), dtype=torch.float64), kept)


def test_the_map_shows_shares_of_the_channels(drawn):
    given = spectra()
    figure = drawn("ranks", given)
    for name, ax in zip("kv", figure.axes[:2], strict=True):
        shares = [[100 * pair[name].rank_for(e) / 16 for pair in given.values()] for e in (0.9, 0.95, 0.99)]
        assert ax.collections[0].get_array().tolist() == shares
        assert [text.get_text() for text in ax.texts] == [f"{share:.0f}" for row in shares for share in row]
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["0", "2", "4"]


def test_pyplot_is_never_imported(tmp_path):
    code = """
import sys, pathlib, cskv_cli.plots as plots
assert "matplotlib" not in sys.modules
from tests.test_plots import spectra, PLOTS
for plot in PLOTS.values():
    plot(pathlib.Path(sys.argv[1]), spectra())
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "plot.png"], check=True, cwd=Path(__file__).parents[1])
