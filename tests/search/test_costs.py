"""Costs between the measured options, and combinations within a budget."""

import math

import pytest

from cskv_cli.memory import Shape, cache_bytes
from cskv_cli.search.combine import Tilt, allocate, smallest_bytes, uniform_settings
from cskv_cli.search.costs import ItemCosts, error_options, fill, measured_options, power_law
from cskv_cli.search.options import BITS, Frame, Option, all_options

CHANNELS = 32
FRAME = Frame(Shape(CHANNELS, 2), (0, 1, 2, 3), 5, window=32, sinks=4, group=32, tokens=8192)


def synthetic(scale=1.0, power=1.0, codes=1.0):
    """Costs with E(rank) = exp(-rank / 4), E(bits) = 0.1 / 4^bits, KL = scale * E^power (of codes: proportional)."""
    error = lambda o: (math.exp(-o.rank / 4) if o.rank < CHANNELS else 0) + (0.1 / 4**o.bits if o.bits else 0)  # noqa: E731
    errors = {option: error(option) for option in error_options(CHANNELS)}
    kls = {
        option: codes * scale * error(option) if option.bits else scale * error(option) ** power
        for option in measured_options(CHANNELS)
    }
    return ItemCosts(CHANNELS, errors, kls)


def test_measured_options_cost_what_was_measured():
    costs = synthetic(scale=0.7, power=1.3)
    for option, kl in costs.divergences.items():
        assert costs(option) == pytest.approx(kl)
    assert costs(Option(CHANNELS)) == 0


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_a_law_is_followed_between_ranks_and_bits(power):
    costs = synthetic(scale=0.5, power=power)
    for rank in (9, 11, 13, 15):
        assert costs(Option(rank)) == pytest.approx(0.5 * math.exp(-rank / 4) ** power)
    for bits in (2, 3, 4):
        assert costs(Option(12, bits)) - costs(Option(12)) == pytest.approx(0.5 * 0.1 / 4**bits)
    assert costs.codes(Option(12, 8)) == pytest.approx(0.5 * 0.1 / 4**4 * (15 / 255) ** 2)


def test_costs_fall_with_rank_and_bits():
    costs = synthetic(power=0.8)
    for bits in BITS:
        line = [costs(o) for o in all_options(CHANNELS) if o.bits == bits]
        assert line == sorted(line, reverse=True)
    assert costs(Option(16, 2)) > costs(Option(16, 3)) > costs(Option(16, 4)) > costs(Option(16, 8)) > costs(Option(16))


def test_power_law_outside_of_its_points_is_proportional():
    points = [(1.0, 2.0), (4.0, 32.0)]
    assert power_law(points, 2.0) == pytest.approx(8.0)
    assert power_law(points, 0.5) == pytest.approx(1.0) and power_law(points, 8.0) == pytest.approx(64.0)


def test_what_is_not_measured_is_guessed_from_the_others():
    options, a, b, c = measured_options(CHANNELS), (0, "k"), (0, "v"), (1, "k")
    errors = {item: dict(zip(options, (1.0, 2.0, 4.0), strict=True)) for item in (a, b, c)}
    measured = {a: dict(zip(options, (3.0, 18.0, 12.0), strict=True)), b: {options[0]: 5.0}, c: {}}
    got = fill(errors, measured, options)
    assert got[a] == measured[a]
    assert got[b] == pytest.approx(dict(zip(options, (5.0, 5 * 2 * 3.0, 5 * 4 * 1.0), strict=True)))
    assert got[c][options[0]] == pytest.approx(4.0)  # the median of 3 and 5


@pytest.mark.parametrize("share", [0.7, 0.8, 0.9, 0.95])
def test_an_allocation_keeps_to_the_budget_by_the_formula_and_uses_it(share):
    costs = {item: synthetic(scale=1 + n) for n, item in enumerate(FRAME.items)}
    budget = int((1 - share) * FRAME.base_bytes)
    setting = allocate(FRAME, costs, budget)
    size = cache_bytes(FRAME.shape, FRAME.layout(setting), FRAME.tokens)
    assert 0.99 * budget <= size <= budget
    total = lambda chosen: sum(costs[item](option) for item, option in chosen.items())  # noqa: E731
    for option in uniform_settings(FRAME, budget):
        uniform = FRAME.uniform(option)
        assert cache_bytes(FRAME.shape, FRAME.layout(uniform), FRAME.tokens) <= budget
        larger = Option(option.rank + 1, option.bits)
        if option.rank < CHANNELS:
            assert cache_bytes(FRAME.shape, FRAME.layout(FRAME.uniform(larger)), FRAME.tokens) > budget
        assert total(setting) <= total(uniform) * 1.05


def test_tilts_move_bytes():
    costs = {item: synthetic() for item in FRAME.items}
    budget = int(0.15 * FRAME.base_bytes)
    size = lambda setting, pick: sum(FRAME.size(i[1], o) for i, o in setting.items() if pick(i))  # noqa: E731
    for tilt, pick in ((Tilt(values=2), lambda i: i[1] == "v"), (Tilt(depth=2), lambda i: i[0] >= 2)):
        assert size(allocate(FRAME, costs, budget, tilt), pick) > size(allocate(FRAME, costs, budget), pick)
    ranks = [sum(o.rank for o in allocate(FRAME, costs, budget, Tilt(codes=t)).values()) for t in (-2, 2)]
    assert ranks[0] > ranks[1]


def test_nothing_fits_below_the_smallest():
    costs = {item: synthetic() for item in FRAME.items}
    assert allocate(FRAME, costs, smallest_bytes(FRAME)) is not None
    assert allocate(FRAME, costs, smallest_bytes(FRAME) - 1) is None


def test_layers_that_stay_exact_are_whole_and_counted():
    setting = dict(FRAME.uniform(Option(8, 4))) | {(1, "k"): FRAME.exact, (1, "v"): FRAME.exact, (2, "k"): FRAME.exact}
    layout = FRAME.layout(setting)
    assert (
        layout.whole == (1,) and layout.rank_k == (8, None, 32, 8, None) and layout.bits_k == (4, None, None, 4, None)
    )

    assert layout.rank_v == (8, None, 8, 8, None)
    size = cache_bytes(FRAME.shape, layout, 8192)
    expected = 8192 * 4 + 3 * 36 * 128 + 8192 * 128 + 8192 * 64
    expected += 2 * 8192 * (8 * (16 + 4) // 32) + 3 * 8192 * (4 + 4)
    assert size == expected
