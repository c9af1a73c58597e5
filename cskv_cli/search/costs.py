"""What each option costs when it alone is taken: measured at a few, in between told from the layer's own output.

An error E in the output of a layer's attention raises the KL of the predictions about in proportion, by a factor that
differs from layer to layer and is measured. E itself is cheap: one attention layer instead of the model. It is asked
at a few ranks without codes, and at a few bits at full rank; the two add up (see `separability`).
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from cskv_cli.search.options import Frame, Item, Option

RANK_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
CODED = (4, 3, 2)
EIGHT_FROM_FOUR = (15 / 255) ** 2  # a step of 8 bits is that of 4 bits by 15/255; its square is the error
TINY = 1e-30

Points = list[tuple[float, float]]  # (E, KL), by rising E


def error_options(channels: int) -> list[Option]:
    """The options whose attention output is compared; the last is the check that rank and bits add up."""
    ranks = sorted({max(1, round(share * channels)) for share in RANK_SHARES})
    return [Option(rank) for rank in ranks] + [Option(channels, bits) for bits in CODED] + [check_option(channels)]


def check_option(channels: int) -> Option:
    """Half the channels in 2 bits."""
    return Option(max(1, round(channels / 2)), 2)


def measured_options(channels: int) -> list[Option]:
    """The options whose KL is measured in every layer, by falling importance."""
    return [Option(max(1, round(channels / 4))), Option(channels, 2), Option(max(1, round(channels / 2)))]


@dataclass(frozen=True)
class ItemCosts:
    """The KL of any option of one item.

    Attributes:
        errors: E of `error_options`.
        divergences: KL of `measured_options`.
    """

    channels: int
    errors: Mapping[Option, float]
    divergences: Mapping[Option, float]

    def __call__(self, option: Option) -> float:
        """Predicted KL, not negative."""
        return self._cut(option.rank) + self.codes(option)

    def codes(self, option: Option) -> float:
        """What the codes add."""
        if option.bits is None:
            return 0.0
        scale = EIGHT_FROM_FOUR if option.bits == 8 else 1.0
        error = scale * self.errors[Option(self.channels, 4 if option.bits == 8 else option.bits)]
        coarsest = Option(self.channels, 2)
        return power_law([(self.errors[coarsest], self.divergences[coarsest])], error)

    @property
    def separability(self) -> float:
        """E of half the channels in 2 bits, over the sum of the two errors apart; 1 where they just add up."""
        option = check_option(self.channels)
        apart = self.errors[Option(option.rank)] + self.errors[Option(self.channels, 2)]
        return self.errors[option] / max(apart, TINY)

    def _cut(self, rank: int) -> float:
        if rank >= self.channels:
            return 0.0
        return power_law(self._cuts(), self._cut_error(rank))

    def _cut_error(self, rank: int) -> float:
        """E at a rank: log E is linear in the rank between those asked, and beyond them as between the nearest two."""
        known = sorted((o.rank, max(e, TINY)) for o, e in self.errors.items() if o.bits is None)
        if len(known) == 1:
            return known[0][1]
        at = min(max(bisect_right([r for r, _ in known], rank), 1), len(known) - 1)
        (low, first), (high, second) = known[at - 1], known[at]
        share = (rank - low) / (high - low)
        return math.exp((1 - share) * math.log(first) + share * math.log(second))

    def _cuts(self) -> Points:
        """Measured without codes, made to rise."""
        points = sorted((self.errors[o], kl) for o, kl in self.divergences.items() if o.bits is None)
        highest = TINY
        rising = []
        for error, kl in points:
            highest = max(highest, kl)
            rising.append((max(error, TINY), highest))
        return rising


def power_law(points: Points, error: float) -> float:
    """KL at an error: a power of it between two points, in proportion to it outside of them."""
    if error <= points[0][0] or len(points) == 1:
        return points[0][1] * error / max(points[0][0], TINY)
    if error >= points[-1][0]:
        return points[-1][1] * error / points[-1][0]
    at = next(i for i, (e, _) in enumerate(points) if e > error)
    (low, first), (high, second) = points[at - 1], points[at]
    share = math.log(error / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(first) + share * math.log(second))


Divergences = dict[Item, dict[Option, float]]


def fill(errors: Divergences, measured: Divergences, options: list[Option]) -> Divergences:
    """The KL of all `options` of all items: where one is not measured, what its E and the other items let expect.

    KL / E of the first option is guessed as the median of the others', that of a later option as so many times that of
    the item's first as in the median of the others.
    """
    factor = lambda item, option: measured[item][option] / max(errors[item][option], TINY)  # noqa: E731
    first, complete = options[0], {item: dict(known) for item, known in measured.items()}
    for option in options:
        ratios = [
            factor(item, option) / (1 if option == first else max(factor(item, first), TINY))
            for item, known in measured.items()
            if option in known and first in known
        ]
        usual = median(ratios) if ratios else 1.0
        for item, known in complete.items():
            if option not in known:
                base = 1.0 if option == first else known[first] / max(errors[item][first], TINY)
                known[option] = usual * base * errors[item][option]
    return complete


def undominated(frame: Frame, name: str, options: list[Option], costs: list[float]) -> list[int]:
    """Indices of the options of which none other is both smaller and better, by rising size."""
    order = sorted(range(len(options)), key=lambda n: (frame.size(name, options[n]), costs[n]))
    kept, best = [], math.inf
    for n in order:
        if costs[n] < best:
            best = costs[n]
            kept.append(n)
    return kept
