"""The knapsack against brute force."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from cskv_cli.search.knapsack import choose

ITEM = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**7)), min_size=1, max_size=4)


def best(items, budget):
    """The least cost within the budget, by trying everything; None where nothing fits."""
    fits = [sum(c for c, _ in pick) for pick in product(*items) if sum(s for _, s in pick) <= budget]
    return min(fits, default=None)


@settings(max_examples=200, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=5), st.integers(0, 3 * 10**7))
def test_never_over_budget_and_as_good_as_the_best_of_a_hair_less(items, budget):
    costs, sizes = ([[option[n] for option in item] for item in items] for n in (0, 1))
    chosen = choose(costs, sizes, budget)
    floor = sum(map(min, sizes))
    if chosen is None:
        assert floor > budget and best(items, budget) is None
        return
    assert sum(size[n] for size, n in zip(sizes, chosen, strict=True)) <= budget
    cost = sum(cost[n] for cost, n in zip(costs, chosen, strict=True))
    assert best(items, budget) - 1e-9 <= cost <= best(items, floor + int((budget - floor) * (1 - 1 / 500))) + 1e-9


def test_the_whole_budget_can_be_used():
    assert choose([[5.0, 1.0], [5.0, 2.0]], [[10, 20], [10, 30]], 30) == [1, 0]
    assert choose([[5.0, 1.0], [5.0, 2.0]], [[10, 20], [10, 30]], 50) == [1, 1]
    assert choose([[5.0, 1.0]], [[10, 20]], 9) is None
