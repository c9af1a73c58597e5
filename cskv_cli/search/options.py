"""What the keys or values of a layer may become, and the bytes that takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from cskv_cli.layout import Layout, unquantized
from cskv_cli.memory import POSITION_BYTES, Shape, latent_bytes

Item = tuple[int, str]  # layer, "k" or "v"
BITS = (None, 8, 4, 3, 2)
RANKS = 24  # ranks on the grid, evenly spread


@dataclass(frozen=True, order=True)
class Option:
    """Latent channels and bits of each (None: the 16 of the model).

    All channels in 16 bits are exact: nothing is rebuilt but what the projection itself gives.
    """

    rank: int
    bits: int | None = None


Setting = Mapping[Item, Option]  # items that it lacks stay exact


def rank_grid(channels: int) -> list[int]:
    """Ranks to choose from, the last one all channels."""
    return sorted({max(1, round(channels * step / RANKS)) for step in range(1, RANKS + 1)})


def all_options(channels: int) -> list[Option]:
    """The grid of ranks times bits."""
    return [Option(rank, bits) for rank in rank_grid(channels) for bits in BITS]


@dataclass(frozen=True)
class Frame:
    """What all settings share.

    Attributes:
        shape: of the cache in 16 bits.
        layers: those that can be compressed.
        count: decoder layers of the model.
        tokens: at which bytes are counted.
    """

    shape: Shape
    layers: tuple[int, ...]
    count: int
    window: int
    sinks: int
    group: int
    tokens: int

    @property
    def items(self) -> list[Item]:
        """What an option is chosen for."""
        return [(i, name) for i in self.layers for name in "kv"]

    @property
    def exact(self) -> Option:
        """The option that changes nothing."""
        return Option(self.shape.channels)

    @property
    def fixed_bytes(self) -> int:
        """Positions, windows and sinks, if every layer is compressed."""
        exact = (min(self.tokens, self.window) + min(self.tokens, self.sinks)) * self.shape.token_bytes
        return self.tokens * POSITION_BYTES + len(self.layers) * exact

    @property
    def base_bytes(self) -> int:
        """The base's cache."""
        return len(self.layers) * self.tokens * self.shape.token_bytes

    def size(self, name: str, option: Option) -> int:
        """Bytes of the latents of one item."""
        return latent_bytes(self.shape, name, option.rank, option.bits, self.group, self.tokens)

    def uniform(self, option: Option) -> Setting:
        """The same everywhere."""
        return dict.fromkeys(self.items, option)

    def layout(self, setting: Setting) -> Layout:
        """The cache of a setting; layers whose keys and values are both exact are whole."""
        chosen = {item: setting.get(item, self.exact) for item in self.items}
        whole = tuple(i for i in self.layers if all(chosen[i, name] == self.exact for name in "kv"))
        inside = [i in self.layers and i not in whole for i in range(self.count)]
        pick = lambda name, what: tuple(  # noqa: E731
            getattr(chosen[i, name], what) if held else None for i, held in enumerate(inside)
        )
        plain = unquantized(self.window, self.sinks, pick("k", "rank"), pick("v", "rank"), whole)
        ones = tuple(1.0 if held else None for held in inside)
        update = {"bits_k": pick("k", "bits"), "bits_v": pick("v", "bits"), "clip_k": ones, "clip_v": ones}
        return plain.model_copy(update=update | {"group": self.group})
