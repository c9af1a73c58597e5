"""All measurements of a search: asked by key, made once, kept in the journal."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from cskv_cli.data.recall import Window
from cskv_cli.progress import Advance
from cskv_cli.search.baselines import kivi_divergences
from cskv_cli.search.costs import ItemCosts, error_options, fill, measured_options
from cskv_cli.search.journal import Journal
from cskv_cli.search.options import Frame, Item, Option, Setting
from cskv_cli.search.simulator import Exact, Simulator

PROXY_WINDOWS = 2  # of those that candidates are measured on: one of text, one of lists


@dataclass(frozen=True)
class Verified:
    """KL per scored token of a whole setting on the held-out part.

    Attributes:
        text, recall: on plain text; on answers and quotes.
        score: the two, weighted.
    """

    text: float
    recall: float
    score: float


class Measurer:
    """Measures on windows of text and of recall, in this order by turns.

    Args:
        simulator: makes the simulator when the first measurement needs it.
        windows: candidates are measured on these.
        held_out: (text, recall) windows; whole settings are measured on these.
        weight: of recall in a score.
    """

    def __init__(
        self,
        simulator: Callable[[], Simulator],
        frame: Frame,
        windows: list[Window],
        held_out: tuple[list[Window], list[Window]],
        weight: float,
        journal: Journal,
        advance: Advance,
    ) -> None:
        self.frame, self.journal, self._advance = frame, journal, advance
        self._make, self._windows, self._held_out, self._weight = simulator, windows, held_out, weight
        self._simulator: Simulator | None = None
        self._exact: dict[str, list[Exact]] = {}
        self.made = 0

    def error(self, item: Item, option: Option) -> float:
        """The error in the output of the item's attention, weighted over text and recall."""

        def measure() -> list[float]:
            pairs = list(zip(self._windows, self._exacts("candidates"), strict=True))[:PROXY_WINDOWS]
            return [self._ready().output_error(item, option, *pair) for pair in pairs]

        return self._weighted(self.journal.get(f"error {_name(item, option)}", measure))

    def divergence(self, item: Item, option: Option) -> float:
        """The KL where this alone is compressed, weighted over text and recall."""

        def measure() -> list[float]:
            pairs = zip(self._windows, self._exacts("candidates"), strict=True)
            kls = [self._ready().divergence({item: option}, *pair) for pair in pairs]
            self.made += 1
            return kls

        result = self._weighted(self.journal.get(f"kl {_name(item, option)}", measure))
        self._advance(1)
        return result

    def has_divergence(self, item: Item, option: Option) -> bool:
        """Whether it is measured already."""
        return f"kl {_name(item, option)}" in self.journal

    def verify(self, setting: Setting) -> Verified:
        """The KL of a whole setting on the held-out part."""
        return self._held_out_score(
            setting_key(self.frame, setting),
            lambda windows, exacts: [
                self._ready().divergence(setting, *pair) for pair in zip(windows, exacts, strict=True)
            ],
        )

    def verify_kivi(self, bits: int) -> Verified:
        """The KL of KIVI at so many bits on the held-out part."""
        measure = lambda windows, exacts: kivi_divergences(self._ready().model, bits, windows, exacts)  # noqa: E731
        return self._held_out_score(_kivi(bits), measure)

    def knows_kivi(self, bits: int) -> bool:
        """Whether it is measured already."""
        return _kivi(bits) in self.journal

    def _held_out_score(self, key: str, kls: Callable[[list[Window], list[Exact]], list[float]]) -> Verified:
        """From the KL of each held-out window, in the order of `_exacts`."""
        text, recall = self._held_out

        def measure() -> list[list[float]]:
            values = kls([*text, *recall], self._exacts("held out"))
            self.made += 1
            return [values[: len(text)], values[len(text) :]]

        measured = self.journal.get(key, measure)
        self._advance(1)
        return self._verified(*map(fmean, measured))

    def is_verified(self, setting: Setting) -> bool:
        """Whether it is measured already."""
        return setting_key(self.frame, setting) in self.journal

    def seconds_for_one(self, setting: Setting) -> float:
        """Time of a whole forward on one window of text."""
        window, exact = self._held_out[0][0], self._exacts("held out")[0]
        began = time.monotonic()
        self._ready().divergence(setting, window, exact)
        return time.monotonic() - began

    @property
    def held_out_windows(self) -> int:
        """Windows that a whole setting is measured on."""
        return sum(map(len, self._held_out))

    def costs(self) -> dict[Item, ItemCosts]:
        """The cost of every option of every item; what is not measured is guessed from the other items."""
        channels, errors, measured = self.frame.shape.channels, {}, {}
        for item in self.frame.items:
            errors[item] = {option: self.error(item, option) for option in error_options(channels)}
            asked = [option for option in measured_options(channels) if self.has_divergence(item, option)]
            measured[item] = {option: self.divergence(item, option) for option in asked}
        filled = fill(errors, measured, measured_options(channels))
        return {item: ItemCosts(channels, errors[item], filled[item]) for item in self.frame.items}

    def _verified(self, text: float, recall: float) -> Verified:
        return Verified(text, recall, (1 - self._weight) * text + self._weight * recall)

    def _weighted(self, values: list[float]) -> float:
        return self._verified(fmean(values[::2]), fmean(values[1::2])).score

    def _ready(self) -> Simulator:
        if self._simulator is None:
            self._simulator = self._make()
        return self._simulator

    def _exacts(self, part: str) -> list[Exact]:
        """What the full cache gives, computed when a measurement first needs it."""
        if part not in self._exact:
            self._exact.clear()  # the other part's hidden states are no longer needed
            windows = self._windows if part == "candidates" else [w for each in self._held_out for w in each]
            single = part == "candidates"
            self._exact[part] = [
                self._ready().exact(window, hidden=single, attention=single and number < PROXY_WINDOWS)
                for number, window in enumerate(windows)
            ]
        return self._exact[part]


def _name(item: Item, option: Option) -> str:
    return f"layer {item[0]} {item[1]} rank {option.rank} bits {option.bits or 16}"


def _kivi(bits: int) -> str:
    return f"kivi {bits} bits"


def setting_key(frame: Frame, setting: Setting) -> str:
    """`all k 96/4 96/4 ... v 96/3 ...`."""
    chosen = {item: setting.get(item, frame.exact) for item in frame.items}
    lists = {n: " ".join(f"{chosen[i, n].rank}/{chosen[i, n].bits or 16}" for i in frame.layers) for n in "kv"}
    return f"all k {lists['k']} v {lists['v']}"


def parse_setting(frame: Frame, key: str) -> Setting:
    """The inverse of `setting_key`."""
    k, v = key.removeprefix("all k ").split(" v ")
    pairs = {"k": k.split(), "v": v.split()}
    setting = {}
    for name, texts in pairs.items():
        for layer, text in zip(frame.layers, texts, strict=True):
            rank, bits = map(int, text.split("/"))
            setting[layer, name] = Option(rank, None if bits == 16 else bits)
    return setting
