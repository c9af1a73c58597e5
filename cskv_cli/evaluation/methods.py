"""The caches that can be scored: CSKV's own, and the baselines, on the same protocol."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from transformers import Cache, DynamicCache, PreTrainedModel

from cskv_cli.checkpoint.layers import compressible_layers
from cskv_cli.checkpoint.load import layout_of, shape_of
from cskv_cli.evaluation.baselines.cache import BaselineCache, BaselineLayer, attached
from cskv_cli.evaluation.baselines.h2o import H2OLayer
from cskv_cli.evaluation.baselines.kivi import KiviLayer
from cskv_cli.evaluation.baselines.kivi import token_bytes as kivi_bytes
from cskv_cli.evaluation.baselines.streaming_llm import StreamingLayer
from cskv_cli.evaluation.baselines.svd_cache import SVDLayer
from cskv_cli.memory import bytes_per_token
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.cskv_positions import Rows
from cskv_cli.spectrum import rank_at

Name = Literal["cskv", "full", "streaming-llm", "h2o", "kivi", "asvd", "svd-cache"]
NAMES: tuple[str, ...] = get_args(Name)
BY_RATIO = ("streaming-llm", "h2o", "asvd", "svd-cache")
"""Baselines whose budget is a ratio, the share of the cache removed; that of KIVI is its bits."""


@dataclass(frozen=True)
class Method:
    """A cache to score.

    Attributes:
        name: as `--method` has it.
        settings: its budget, {"ratio": 0.8} or {"bits": 4}.
        model: a CSKV model for "cskv" and "asvd", else any.
        new_cache: makes an empty one.
        token_bytes: what a token adds to a long cache, in bytes.
        reads_attention: it needs attention probabilities.
        source: the model it is scored on, as the user named it.
    """

    name: str
    model: PreTrainedModel
    new_cache: Callable[[], Cache]
    token_bytes: float
    settings: dict[str, Any] = field(default_factory=dict)
    reads_attention: bool = False
    source: str = ""

    @property
    def simulates(self) -> bool:
        """Whether one parallel forward gives what decoding gives (for CSKV see `evaluation.simulation`)."""
        return isinstance(self.new_cache(), CSKVCache | DynamicCache)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, the model can be given this method's cache."""
        with attached(self.model), eagerly(self.model, self.reads_attention):
            yield


@contextmanager
def eagerly(model: PreTrainedModel, wanted: bool = True) -> Iterator[None]:
    """Inside, if wanted, the model's attention gives its probabilities."""
    before = model.config._attn_implementation
    if wanted:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if wanted:
            model.set_attn_implementation(before)


def cskv(model: PreTrainedModel) -> Method:
    """The checkpoint's own cache."""
    size = bytes_per_token(shape_of(model), layout_of(model))
    return Method("cskv", model, lambda: CSKVCache(model.config), size)


def full(model: PreTrainedModel) -> Method:
    """Every key and value."""
    size = len(compressible_layers(model.config)) * shape_of(model).token_bytes
    return Method("full", model, lambda: DynamicCache(config=model.config), size)


def asvd(model: PreTrainedModel, ratio: float) -> Method:
    """See `baselines.asvd`, which makes the model."""
    size = bytes_per_token(shape_of(model), layout_of(model))
    return Method("asvd", model, lambda: CSKVCache(model.config), size, {"ratio": ratio})


def by_ratio(name: str, model: PreTrainedModel, ratio: float) -> Method:
    """StreamingLLM, H2O or the truncated cache at a ratio."""
    shape, layers = shape_of(model), len(compressible_layers(model.config))
    kept = (1 - ratio) * shape.token_bytes
    if name == "svd-cache":
        rank = rank_at(ratio, shape.channels)
        make: Callable[[Rows], BaselineLayer] = lambda rows: SVDLayer(rank, rows)  # noqa: E731
        kept = 2 * rank * shape.dtype_bytes
    elif name == "h2o":
        make = lambda rows: H2OLayer(ratio, rows)  # noqa: E731
        kept += (1 - ratio) * 4 * shape.heads
    else:
        make = lambda rows: StreamingLayer(ratio, rows)  # noqa: E731
    new_cache = lambda: BaselineCache(model.config, make)  # noqa: E731
    return Method(name, model, new_cache, layers * kept, {"ratio": ratio}, reads_attention=name == "h2o")


def kivi(model: PreTrainedModel, bits: int) -> Method:
    """KIVI at so many bits."""
    shape, layers = shape_of(model), len(compressible_layers(model.config))
    size = layers * kivi_bytes(bits, shape.channels, shape.channels // shape.heads)
    new_cache = lambda: BaselineCache(model.config, lambda rows: KiviLayer(bits, rows))  # noqa: E731
    return Method("kivi", model, new_cache, size, {"bits": bits})
