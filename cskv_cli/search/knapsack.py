"""The multiple-choice knapsack: one option of each item, of least total cost, within a budget of bytes."""

from collections.abc import Sequence

import torch

CELLS_PER_ITEM = 500  # rounding up to cells wastes at most 1/500 of the budget


def choose(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> list[int] | None:
    """Index of the option to take of each item; None where even the smallest do not fit.

    Dynamic programming over the budget in cells; sizes are rounded up to cells, so the budget is never exceeded, and
    the total cost is at most that of the best choice within (1 - 1/500) of the budget beyond the smallest options.
    What rounding left is spent greedily.
    """
    floors = [min(options) for options in sizes]
    room = budget - sum(floors)
    if room < 0:
        return None
    cells = CELLS_PER_ITEM * len(sizes)
    unit = max(room / cells, 1e-9)
    best = torch.zeros(cells + 1, dtype=torch.float64)  # least cost of the items so far, by cells used at most
    taken = []
    for item_costs, item_sizes, floor in zip(costs, sizes, floors, strict=True):
        steps = [_cells_up(size - floor, unit) for size in item_sizes]
        new, pick = torch.full_like(best, float("inf")), torch.zeros(cells + 1, dtype=torch.int32)
        for option, (cost, step) in enumerate(zip(item_costs, steps, strict=True)):
            if step > cells:
                continue
            tried = best[: cells + 1 - step] + cost
            better = tried < new[step:]
            new[step:][better] = tried[better]
            pick[step:][better] = option
        best = new
        taken.append((pick, steps))
    cell, chosen = cells, []
    for pick, steps in reversed(taken):
        option = int(pick[cell])
        chosen.append(option)
        cell -= steps[option]
    return _fill(chosen[::-1], costs, sizes, budget)


def _fill(
    chosen: list[int], costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int
) -> list[int]:
    """Spend what the rounding left: as long as one fits, the change of one item that saves most."""
    left = budget - sum(options[n] for options, n in zip(sizes, chosen, strict=True))
    while True:
        changes = [
            (costs[item][new] - costs[item][now], item, new)
            for item, now in enumerate(chosen)
            for new, size in enumerate(sizes[item])
            if costs[item][new] < costs[item][now] and size - sizes[item][now] <= left
        ]
        if not changes:
            return chosen
        _, item, new = min(changes)
        left -= sizes[item][new] - sizes[item][chosen[item]]
        chosen[item] = new


def _cells_up(size: int, unit: float) -> int:
    """Whole cells that hold `size` bytes."""
    cells = int(size / unit)
    while cells * unit < size:
        cells += 1
    return cells
