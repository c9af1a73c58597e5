"""The model with any rank and bits in any layer, measured against itself with its full cache."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cskv_cli import statistics
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.layers import kv_projections
from cskv_cli.checkpoint.load import load_unfilled
from cskv_cli.data.recall import Window
from cskv_cli.evaluation.divergence import divergence, predictions
from cskv_cli.evaluation.simulation import decode_simulation
from cskv_cli.factorize import METHODS, Context
from cskv_cli.modeling.cskv_structure import find_attention, find_decoder
from cskv_cli.search.options import Frame, Item, Option, Setting


@dataclass
class Exact:
    """What the full cache gives on one window.

    Attributes:
        logits: at the scored tokens, [scored, vocabulary].
        hidden: the input of each decoder layer, [1, tokens, hidden]; none where only whole forwards are measured.
        attention: by layer, the arguments of its attention and its output [1, tokens, hidden].
    """

    logits: torch.Tensor
    hidden: list[torch.Tensor] = field(default_factory=list)
    attention: dict[int, tuple[tuple, dict[str, Any], torch.Tensor]] = field(default_factory=dict)


class Simulator:
    """A base model whose layers take the factors and codes of a setting.

    Factors are `whitened`: rank r takes the first r principal axes of the keys or values. Latents that become codes
    are rotated at random, unclipped, which is what `quantize` usually finds best.

    Args:
        calibrated: the folder with the statistics of the layers.
    """

    def __init__(self, base: BaseModel, frame: Frame, calibrated: Path, dtype: torch.dtype, device: str) -> None:
        self.frame, self._calibrated = frame, calibrated
        self._axes: dict[Item, torch.Tensor] = {}
        layout = frame.layout(frame.uniform(Option(1)))
        self.model: PreTrainedModel = load_unfilled(base.folder, layout, dtype).to(device).requires_grad_(False)
        self._layers: nn.ModuleList = find_decoder(self.model).layers
        self._installed: dict[Item, Option] = {}
        self._gives_tuples = False

    @torch.inference_mode()
    def exact(self, window: Window, hidden: bool, attention: bool) -> Exact:
        """Run the model with its full cache, and keep what is asked for."""
        kept = Exact(torch.empty(0))
        with ExitStack() as stack:
            for i, layer in enumerate(self._layers):
                if hidden:
                    see = lambda _, args, kwargs: kept.hidden.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
                    stack.callback(layer.register_forward_pre_hook(see, with_kwargs=True).remove)
                if attention and i in self.frame.layers:
                    hook = find_attention(layer).register_forward_hook(_keep(kept.attention, i), with_kwargs=True)
                    stack.callback(hook.remove)
            stack.callback(self._layers[0].register_forward_hook(self._see_output).remove)
            kept.logits = predictions(self.model, window)
        return kept

    @torch.inference_mode()
    def divergence(self, setting: Setting, window: Window, exact: Exact) -> float:
        """KL(full cache || setting), the mean over the scored tokens, in decode simulation.

        With hidden states at hand the model runs only from the lowest layer that the setting changes.
        """
        self._install(setting)
        first = min(i for i, _ in setting) if exact.hidden else 0
        hidden = exact.hidden[first] if exact.hidden else None
        hidden = (hidden,) if self._gives_tuples else hidden
        with starting_at(self._layers, first, hidden), decode_simulation(self.model, window.prefill):
            predicted = predictions(self.model, window)
        return divergence(exact.logits, predicted).item()

    @torch.inference_mode()
    def output_error(self, item: Item, option: Option, window: Window, exact: Exact) -> float:
        """Squared error of the output of the item's own attention, per decoded token: queries, softmax and output
        projection weigh what an error in the latents does."""
        self._install({item: option})
        args, kwargs, expected = exact.attention[item[0]]
        with decode_simulation(self.model, window.prefill):
            output = find_attention(self._layers[item[0]])(*args, **kwargs)[0]
        return (output - expected)[:, window.prefill :].float().square().sum(-1).mean().item()

    def _see_output(self, layer: nn.Module, args: tuple, output: Any) -> None:
        self._gives_tuples = isinstance(output, tuple)

    def _install(self, setting: Setting) -> None:
        """Give the layers of a setting their factors, and the cache its layout."""
        layout = self.frame.layout(setting)
        self.model.config.cskv = layout.model_dump(mode="json")
        for i in layout.layers:
            for name in "kv":
                option = setting.get((i, name), self.frame.exact)
                if self._installed.get((i, name)) != option:
                    self._write((i, name), option)
                    self._installed[i, name] = option

    def _principal_axes(self, item: Item, weight: torch.Tensor) -> torch.Tensor:
        """[channels, channels], in columns by falling variance."""
        if item not in self._axes:
            stats = statistics.load_layer(self._calibrated, item[0])
            context = Context(stats.gram.double(), stats.mean_abs.double(), 0.0, torch.Generator())
            _, b = METHODS["whitened"](weight.cpu().double(), weight.shape[1], context)
            self._axes[item] = b.T.float()
        return self._axes[item]

    def _write(self, item: Item, option: Option) -> None:
        attention, name = find_attention(self._layers[item[0]]), item[1]
        weight, bias = kv_projections(attention)[name]
        if option == self.frame.exact:
            a, b = weight, torch.eye(option.rank, device=weight.device)
        else:
            axes = self._principal_axes(item, weight)[:, : option.rank].to(weight.device)
            if option.bits is not None:
                axes = axes @ _rotation(option.rank).to(axes)
            a, b = weight @ axes, axes.T
        down, up = getattr(attention, f"{name}_down"), getattr(attention, f"{name}_up")
        down.weight.data, up.weight.data = (part.T.to(self.model.dtype).contiguous() for part in (a, b))
        if bias is not None:
            up.bias.data = bias.to(self.model.dtype)


def _keep(kept: dict[int, Any], index: int) -> Any:
    def see(attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> None:
        kept[index] = args, dict(kwargs), output[0]

    return see


@functools.cache
def _rotation(rank: int) -> torch.Tensor:
    """A random orthogonal matrix [rank, rank], always the same: `quantize` tries such ones too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).Q.float()


@contextmanager
def starting_at(layers: nn.ModuleList, first: int, hidden: torch.Tensor | tuple | None) -> Iterator[None]:
    """Within, the layers below `first` compute nothing but give `hidden`, which layer `first` reads."""
    skipped = list(layers[:first])
    forwards = [layer.forward for layer in skipped]
    try:
        for layer in skipped:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden
        yield
    finally:
        for layer, forward in zip(skipped, forwards, strict=True):
            layer.forward = forward
