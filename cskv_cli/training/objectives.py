"""The two losses: how each brings about its gradients, and how it scores the held-out part."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from cskv_cli.checkpoint.layers import kv_projections
from cskv_cli.data.recall import Window
from cskv_cli.evaluation.divergence import divergence, predictions
from cskv_cli.evaluation.simulation import decode_simulation, latents_of
from cskv_cli.modeling.cskv_cache import CSKVLayer
from cskv_cli.modeling.cskv_structure import find_decoder
from cskv_cli.training.student import compressed_layers, precision


@dataclass(frozen=True)
class Score:
    """Of one window: its loss, and how many of its answers would be given right throughout, of how many."""

    loss: float
    right: int = 0
    answers: int = 0


class Objective(Protocol):
    """What is brought down."""

    def backward(self, window: Window, weight: float) -> float:
        """Add `weight` times the gradient of a window's loss to that of the factors; return the loss."""

    def score(self, window: Window) -> Score:
        """Without gradients."""


class Distillation:
    """KL(full cache || compressed cache) of the predictions, the mean over the tokens that a window scores.

    The teacher is the same model with exact keys and values; the student attends in decode simulation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def backward(self, window: Window, weight: float) -> float:
        """See `Objective.backward`."""
        teacher = self._teacher(window)
        with decode_simulation(self.model, window.prefill):  # still there if activations are computed anew
            loss = divergence(teacher, self._predict(window))
            (weight * loss).backward()
        return loss.item()

    @torch.no_grad()
    def score(self, window: Window) -> Score:
        """See `Objective.score`; an answer is a run of scored tokens."""
        teacher = self._teacher(window)
        with decode_simulation(self.model, window.prefill):
            student = self._predict(window)
        scored = window.scored.nonzero()[:, 0]
        right = student.argmax(-1).cpu() == window.ids[scored + 1]
        answers = right.tensor_split((scored.diff() > 1).nonzero()[:, 0] + 1)
        return Score(divergence(teacher, student).item(), sum(bool(run.all()) for run in answers), len(answers))

    @torch.no_grad()
    def _teacher(self, window: Window) -> torch.Tensor:
        return self._predict(window)

    def _predict(self, window: Window) -> torch.Tensor:
        with precision(self.model):
            return predictions(self.model, window)


class Reconstruction:
    """Mean squared error of each layer's keys and values before bias, norm and RoPE (eq. 1 and 2 of arXiv 2409.10593).

    Layers are independent: each has its loss behind it before the next one runs, so no graph outlives a layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def backward(self, window: Window, weight: float) -> float:
        """See `Objective.backward`; the loss is the sum over the layers."""
        return self._run(window, weight)

    def score(self, window: Window) -> Score:
        """See `Objective.score`; there are no answers."""
        return Score(self._run(window, None))

    @torch.no_grad()
    def _run(self, window: Window, weight: float | None) -> float:
        losses: list[torch.Tensor] = []

        def hook(layer: CSKVLayer) -> Any:
            def see(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                with torch.set_grad_enabled(weight is not None), torch.autocast(hidden.device.type, enabled=False):
                    loss = layer_error(attention, layer, hidden.float())
                    if weight is not None:
                        (weight * loss).backward()
                losses.append(loss.detach())

            return see

        with ExitStack() as stack, precision(self.model):
            for attention, layer in compressed_layers(self.model):
                handle = attention.register_forward_pre_hook(hook(layer), with_kwargs=True)
                stack.callback(handle.remove)
            find_decoder(self.model).module(window.ids[None].to(self.model.device), use_cache=False)
        return torch.stack(losses).sum().item()


def layer_error(attention: nn.Module, layer: CSKVLayer, hidden: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the keys plus that of the values, of the tokens [1, tokens, hidden] behind the sinks."""
    latents = latents_of(attention, layer, hidden)
    total = 0
    for (name, (weight, bias)), latent in zip(kv_projections(attention).items(), latents, strict=True):
        expected = hidden @ weight if bias is None else hidden @ weight + bias
        rebuilt = getattr(attention, f"{name}_up")(latent)
        total = total + nn.functional.mse_loss(rebuilt[:, layer.sinks :], expected[:, layer.sinks :])
    return total


OBJECTIVES: dict[str, type[Objective]] = {"distill": Distillation, "reconstruction": Reconstruction}
