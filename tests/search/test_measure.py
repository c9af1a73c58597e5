"""The journal, and the measurer that keeps it."""

import pytest

from cskv_cli.search.journal import Journal
from cskv_cli.search.measure import Measurer, parse_setting, setting_key
from cskv_cli.search.options import Option
from tests.search.test_costs import FRAME
from tests.search.test_simulator import MIXED


def test_a_journal_gives_back_what_was_measured_and_measures_nothing_twice(tmp_path):
    path = tmp_path / "journal"
    first = Journal(path, "id")
    assert first.get("a", lambda: [0.25]) == [0.25] and first.get("a", None) == [0.25]
    first.get("b", lambda: 2)
    second = Journal(path, "id")
    assert second.get("a", None) == [0.25] and second.get("b", None) == 2 and second.made == 0
    assert "b" not in Journal(path, "another") and "a" not in Journal(path, "id")  # begun anew


def test_a_line_cut_short_is_measured_again(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, "id")
    journal.get("a", lambda: 1)
    journal.get("b", lambda: 2)
    path.write_bytes(path.read_bytes()[:-4])
    again = Journal(path, "id")
    assert "a" in again and "b" not in again
    again.get("b", lambda: 3)
    assert Journal(path, "id").get("b", None) == 3


def test_setting_keys_go_there_and_back():
    assert parse_setting(FRAME, setting_key(FRAME, MIXED)) == MIXED


def test_scores_are_weighted_means(tmp_path, make_simulator, windows):
    simulator, _ = make_simulator("Llama")
    measurer = Measurer(
        lambda: simulator,
        simulator.frame,
        windows,
        ([windows[0]], [windows[1]]),
        0.25,
        Journal(tmp_path / "journal", "id"),
        lambda steps: None,
    )
    kl = [simulator.divergence(MIXED, w, simulator.exact(w, hidden=False, attention=False)) for w in windows]
    verified = measurer.verify(MIXED)
    assert (verified.text, verified.recall) == pytest.approx(kl)
    assert verified.score == pytest.approx(0.75 * kl[0] + 0.25 * kl[1])
    one = {(1, "v"): Option(6, 2)}
    kl = [simulator.divergence(one, w, simulator.exact(w, hidden=True, attention=False)) for w in windows]
    assert measurer.divergence((1, "v"), Option(6, 2)) == pytest.approx(0.75 * kl[0] + 0.25 * kl[1])
    assert measurer.made == 2
    assert measurer.verify(MIXED) == verified and measurer.made == 2
