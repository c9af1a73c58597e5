"""From the costs of single options to one setting within a budget, and variations of it to verify."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cskv_cli.search import knapsack
from cskv_cli.search.costs import ItemCosts, undominated
from cskv_cli.search.options import BITS, Frame, Item, Option, Setting, all_options

STEP = math.log(1.5)


@dataclass(frozen=True)
class Tilt:
    """How the costs are bent, where layers together are not the sum of what they are alone; all in natural logarithms.

    Attributes:
        values: weight of values over keys.
        depth: weight of the last layer over the first.
        codes: weight of the error of codes over that of a cut of the rank.
    """

    values: float = 0.0
    depth: float = 0.0
    codes: float = 0.0

    def moved(self, name: str, by: float) -> "Tilt":
        """Along one of them."""
        return Tilt(**vars(self) | {name: getattr(self, name) + by})


DIRECTIONS = [(name, sign * STEP) for name in ("values", "codes", "depth") for sign in (1, -1)]


def allocate(frame: Frame, costs: dict[Item, ItemCosts], budget: int, tilt: Tilt = Tilt()) -> Setting | None:  # noqa: B008
    """The setting of least summed cost whose cache takes at most `budget` bytes; None where nothing fits."""
    options = all_options(frame.shape.channels)
    table, sizes, picks = [], [], []
    for position, (item, cost) in enumerate(costs.items()):
        bent = [_bent(cost, option, tilt, item[1], position / max(len(costs) - 1, 1)) for option in options]
        kept = undominated(frame, item[1], options, bent)
        picks.append([options[n] for n in kept])
        table.append([bent[n] for n in kept])
        sizes.append([frame.size(item[1], options[n]) for n in kept])
    chosen = knapsack.choose(table, sizes, budget - frame.fixed_bytes)
    if chosen is None:
        return None
    return {item: pick[n] for item, pick, n in zip(costs, picks, chosen, strict=True)}


def _bent(cost: ItemCosts, option: Option, tilt: Tilt, name: str, depth: float) -> float:
    codes = cost.codes(option)
    weight = math.exp((tilt.values if name == "v" else 0.0) + tilt.depth * (depth - 0.5))
    return weight * (cost(option) - codes + math.exp(tilt.codes) * codes)


def smallest_bytes(frame: Frame) -> int:
    """The least that any setting takes."""
    least = {name: min(frame.size(name, o) for o in all_options(frame.shape.channels)) for name in "kv"}
    return frame.fixed_bytes + len(frame.layers) * sum(least.values())


def uniform_settings(frame: Frame, budget: int) -> Iterator[Option]:
    """For each number of bits the largest rank that fits in every layer alike."""
    for bits in BITS:
        fits = [
            rank
            for rank in range(1, frame.shape.channels + 1)
            if frame.fixed_bytes + len(frame.layers) * sum(frame.size(n, Option(rank, bits)) for n in "kv") <= budget
        ]
        if fits:
            yield Option(fits[-1], bits)
