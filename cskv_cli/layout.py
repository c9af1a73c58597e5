"""What the cache of each layer holds: the `cskv` block of an exported config."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from cskv_cli.config import Bits, StageConfig
from cskv_cli.errors import CskvError
from cskv_cli.run import write_json

LAYOUT = "layout.json"
PerLayer = tuple[int | None, ...]


class Layout(StageConfig):
    """The `cskv` block of an exported config: what the cache of each layer holds. None: the layer is left as it is.

    Attributes:
        rank_k, rank_v: latent channels.
        bits_k, bits_v: bits of a latent; None where they stay in the model's precision.
        clip_k, clip_v: share of a group's range that its codes cover.
        group: tokens that share a minimum and a step.
        head_groups: groups of KV heads, each of which has its own share of the latent channels.
        whole: layers that could be compressed and are left as they are; the others without ranks are bounded anyway.
    """

    version: Literal[1] = 1
    window: int = Field(ge=1)
    sinks: int = Field(ge=0)
    rank_k: PerLayer
    rank_v: PerLayer
    bits_k: tuple[Bits | None, ...]
    bits_v: tuple[Bits | None, ...]
    clip_k: tuple[float | None, ...]
    clip_v: tuple[float | None, ...]
    group: int | None = Field(None, ge=1)
    head_groups: int = Field(1, ge=1)
    whole: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "Layout":
        lengths = {len(getattr(self, f"{what}_{x}")) for what in ("rank", "bits", "clip") for x in "kv"}
        if len(lengths) != 1:
            raise ValueError("the per-layer lists differ in length")
        if self.quantized and (self.group is None or self.group > self.window):
            raise ValueError(f"group ({self.group}) must not exceed the window ({self.window})")
        if any(rank is not None and rank % self.head_groups for rank in self.rank_k + self.rank_v):
            raise ValueError(f"ranks do not divide by {self.head_groups} head groups")
        return self

    @property
    def quantized(self) -> bool:
        """Whether any layer holds codes."""
        return any(bits is not None for bits in self.bits_k + self.bits_v)

    @property
    def layers(self) -> list[int]:
        """Indices of the compressed layers."""
        return [i for i, rank in enumerate(self.rank_k) if rank is not None]


def unquantized(window: int, sinks: int, rank_k: PerLayer, rank_v: PerLayer, whole: tuple[int, ...] = ()) -> Layout:
    """A layout without codes."""
    none = (None,) * len(rank_k)
    lists = dict(rank_k=rank_k, rank_v=rank_v, bits_k=none, bits_v=none, clip_k=none, clip_v=none)
    return Layout(window=window, sinks=sinks, whole=whole, **lists)


def span(values: Sequence[int | None]) -> str:
    """`96`, or `24 to 168` where layers differ; layers left as they are do not count."""
    present = [value for value in values if value is not None]
    low, high = min(present), max(present)
    return str(low) if low == high else f"{low} to {high}"


def bits_span(bits: Sequence[int | None], ranks: Sequence[int | None]) -> str:
    """As `span`, of the bits of the layers that have ranks; those without codes have 16."""
    return span([each or 16 for each, rank in zip(bits, ranks, strict=True) if rank is not None])


def save_layout(folder: Path, layout: Layout) -> None:
    """Write the layout."""
    write_json(folder / LAYOUT, layout.model_dump(mode="json"))


def load_layout(folder: Path) -> Layout:
    """Read the layout."""
    return parse_layout(json.loads((folder / LAYOUT).read_text()), folder / LAYOUT)


def parse_layout(block: dict[str, Any], path: Path) -> Layout:
    """A layout from what a file holds.

    Raises:
        CskvError: it was written by another version.
    """
    try:
        return Layout(**block)
    except (ValidationError, TypeError) as error:
        raise CskvError(
            f"{path} describes a cache that this version of cskv does not know: {' '.join(str(error).split())}",
            "use the version of cskv that made it, or compress the base model again",
        ) from error
