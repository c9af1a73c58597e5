"""Where the bytes go: rank and bits per layer of keys and values, written by `cskv search`, edited by whoever likes."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from cskv_cli.config import Bits, StageConfig
from cskv_cli.errors import CskvError
from cskv_cli.layout import Layout, unquantized

ALLOCATION = "allocation.json"
AUTO = "auto"


class Choice(StageConfig):
    """Latent channels of the keys, or of the values, of a layer, and bits of each; None: the model's 16."""

    rank: int = Field(ge=1)
    bits: Bits | None = None


class LayerChoice(StageConfig):
    """A layer; without `k` and `v` it is left as it is."""

    index: int = Field(ge=0)
    k: Choice | None
    v: Choice | None

    @model_validator(mode="after")
    def _both(self) -> "LayerChoice":
        if (self.k is None) != (self.v is None):
            raise ValueError("k and v must both be given, or both be null (a whole layer)")
        return self


class Allocation(StageConfig):
    """Rank and bits per layer.

    Attributes:
        search: what the search says of it (bytes, KL); nothing reads it.
    """

    version: Literal[1] = 1
    window: int = Field(ge=1)
    sinks: int = Field(ge=0)
    group: int = Field(ge=1)
    layers: tuple[LayerChoice, ...]
    search: dict[str, Any] = {}

    def layout(self, count: int, path: Path | str, layers: list[int], channels: int) -> Layout:
        """What a model's cache holds under it, bits and all; clips are 1.

        Args:
            count: decoder layers of the model.
            path: its file, for error messages.
            layers: those that can be compressed.
            channels: of a layer's key cache.

        Raises:
            CskvError: it is not for this model; the layer is named.
        """
        chosen = {layer.index: layer for layer in self.layers}
        self._check(chosen, path, layers, channels)
        pick = lambda name, what: tuple(  # noqa: E731
            getattr(getattr(chosen[i], name), what) if i in chosen and getattr(chosen[i], name) is not None else None
            for i in range(count)
        )
        whole = tuple(i for i in layers if chosen[i].k is None)
        plain = unquantized(self.window, self.sinks, pick("k", "rank"), pick("v", "rank"), whole)
        bits = {f"bits_{name}": pick(name, "bits") for name in "kv"}
        ones = tuple(None if rank is None else 1.0 for rank in plain.rank_k)
        return plain.model_copy(update=bits | {"clip_k": ones, "clip_v": ones, "group": self.group})

    def _check(self, chosen: dict[int, LayerChoice], path: Path | str, layers: list[int], channels: int) -> None:
        hint = "edit it, or make a new one: cskv search"
        if self.group > self.window:
            raise CskvError(f"{path}: group {self.group} is more than the window of {self.window} tokens", hint)
        for layer in self.layers:
            if layer.index not in layers:
                raise CskvError(f"{path}: layer {layer.index} is none of this model's that can be compressed", hint)
            for name in "kv":
                choice = getattr(layer, name)
                if choice is not None and choice.rank > channels:
                    raise CskvError(
                        f"{path}: layer {layer.index}: rank {choice.rank} of {name} is more than the {channels} "
                        "channels the cache has",
                        hint,
                    )
        if lacking := sorted(set(layers) - set(chosen)):
            raise CskvError(f"{path}: layer {lacking[0]} is missing (null for k and v leaves it whole)", hint)
        if len(chosen) != len(self.layers):
            raise CskvError(f"{path}: a layer is given twice", hint)
        if all(choice.k is None for choice in self.layers):
            raise CskvError(f"{path}: every layer is whole, there is nothing to compress", hint)


def read_allocation(path: Path) -> Allocation:
    """Read an allocation.

    Raises:
        CskvError: it is not there, or not one; what is wrong is named with its layer.
    """
    hint = "edit it, or make a new one: cskv search"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CskvError(f"cannot read {path}: {error.strerror}", "run: cskv search, or name another file") from error
    except ValueError as error:
        raise CskvError(f"{path} is not JSON: {error}", hint) from error
    try:
        return Allocation.model_validate(content)
    except ValidationError as error:
        raise CskvError(f"{path}: {_where(content, error.errors()[0])}", hint) from error


def _where(content: Any, error: Any) -> str:
    """`layer 3: k.bits: Input should be ...`."""
    place, message = list(error["loc"]), error["msg"].removeprefix("Value error, ")
    if len(place) > 1 and place[0] == "layers":
        layer = content["layers"][place[1]]
        index = layer.get("index", "?") if isinstance(layer, dict) else "?"
        return f"layer {index}: {'.'.join(map(str, [*place[2:], message][:-1])) or 'it'}: {message}"
    return f"{'.'.join(map(str, place)) or 'the file'}: {message}"
