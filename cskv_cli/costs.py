"""What decoding a token must cost, by the model of docs/performance.md, and what this machine can do."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cskv_cli.layout import Layout
from cskv_cli.memory import Shape, latent_bytes
from cskv_cli.modeling.cskv_layer import WAITING
from cskv_cli.modeling.cskv_structure import attentions, width_of_head
from cskv_cli.training.student import PARTS

SIZES = {"cpu": (1536, 2**27), "cuda": (8192, 2**30)}  # of the product, and bytes, that the machine is timed on
SECONDS = 0.5  # of each timing


@dataclass(frozen=True)
class Machine:
    """Floating-point operations and bytes that it does in a second, as measured."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Step:
    """Of one decode step: multiply-adds of its matrix products, and bytes read."""

    multiply_adds: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The least time: that of the arithmetic, or that of the memory, whichever is longer."""
        return max(2 * self.multiply_adds / machine.operations, self.bytes / machine.bytes)


@dataclass(frozen=True)
class Dims:
    """What the cost of a step depends on, beside the layout.

    Attributes:
        hidden, heads, query_channels: of the model's attention.
        parameters: numbers that a step multiplies with, without the factors.
    """

    shape: Shape
    hidden: int
    heads: int
    query_channels: int
    parameters: int


def dims_of(model: PreTrainedModel, shape: Shape) -> Dims:
    """Those of a CSKV model; `parameters` are its matrices but for the input embedding and the factors."""
    config, attention = model.config.get_text_config(decoder=True), attentions(model)[0]
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}
    counted = sum(count for name, count in matrices.items() if name.split(".")[-2] not in PARTS)
    if not config.tie_word_embeddings:
        counted -= model.get_input_embeddings().weight.numel()
    heads = config.num_attention_heads
    return Dims(shape, config.hidden_size, heads, heads * width_of_head(attention), counted)


def base_step(dims: Dims, layout: Layout, tokens: int, batch: int = 1) -> Step:
    """A step of the base after `tokens` tokens: its weights once, and the cache of each sequence."""
    cache = _full_layer(dims, tokens)
    return _step(dims, batch, [cache] * (len(layout.layers) + len(layout.whole)))


def cskv_step(dims: Dims, layout: Layout, tokens: int, batch: int = 1) -> Step:
    """The same with CSKV: keys rebuilt, values weighed as latents."""
    old = max(tokens - layout.window - layout.sinks, 0)
    layers = [_full_layer(dims, tokens)] * len(layout.whole)
    for i in layout.layers:
        rank_k, rank_v = (rank / layout.head_groups for rank in (layout.rank_k[i], layout.rank_v[i]))
        exact, adds = tokens - old, 2 * tokens * dims.query_channels
        adds += old * rank_k * dims.shape.channels + old * rank_v * dims.heads + rank_v * dims.query_channels
        adds += dims.hidden * (layout.rank_k[i] + layout.rank_v[i])
        latents = sum(
            latent_bytes(dims.shape, name, ranks[i], bits[i], layout.group, old)
            for name, ranks, bits in (("k", layout.rank_k, layout.bits_k), ("v", layout.rank_v, layout.bits_v))
        )
        layers.append(Step(adds, latents + exact * dims.shape.token_bytes))
    at_once = min(WAITING, layout.window)  # tokens that A is read for
    factors = sum(
        rank * (dims.hidden / at_once + dims.shape.channels / layout.head_groups)
        for ranks in (layout.rank_k, layout.rank_v)
        for rank in ranks
        if rank is not None
    )
    step = _step(dims, batch, layers)
    return Step(step.multiply_adds, step.bytes + factors * dims.shape.dtype_bytes)


def measure_machine(device: str, dtype: torch.dtype) -> Machine:
    """The best of some large matrix products, and of some copies of memory (read and written)."""
    width, count = SIZES.get(device, SIZES["cpu"])
    square = torch.randn(width, width, device=device).to(dtype)
    block = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    return Machine(2 * width**3 / _best(lambda: square @ square), 2 * count / _best(lambda: target.copy_(block)))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    least, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        start = now()
        work()
        least = min(least, now() - start)
    return least


def now() -> float:
    """The time, once a GPU is done with what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _full_layer(dims: Dims, tokens: int) -> Step:
    return Step(2 * tokens * dims.query_channels, tokens * dims.shape.token_bytes)


def _step(dims: Dims, batch: int, layers: list[Step]) -> Step:
    adds = batch * (dims.parameters + sum(layer.multiply_adds for layer in layers))
    return Step(adds, dims.parameters * dims.shape.dtype_bytes + batch * sum(layer.bytes for layer in layers))
