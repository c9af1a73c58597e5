"""How far what a model predicts with a smaller cache is from what it predicts with its full one."""

from typing import Any

import torch
from transformers import PreTrainedModel

from cskv_cli.data.recall import Window

ROWS = 16  # logits compared at a time, so that all that is made of them stays in the cache of a CPU


def predictions(model: PreTrainedModel, window: Window) -> torch.Tensor:
    """Logits at the tokens that a window scores, [scored, vocabulary], in the precision of the model."""
    ids, scored = window.ids[None].to(model.device), window.scored.nonzero()[:, 0]
    return model(ids, use_cache=False, logits_to_keep=scored.to(ids.device)).logits[0]


def divergence(full: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
    """KL(full || compressed) of logits [tokens, vocabulary], computed in float32: the mean over the tokens, in nats.

    Differentiable with respect to `compressed`.
    """
    return _Divergence.apply(full, compressed)


class _Divergence(torch.autograd.Function):
    """Makes the gradient, softmax(compressed) - softmax(full), together with the sum: nothing in float32 is kept."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
        gradient = torch.empty_like(compressed) if ctx.needs_input_grad[1] else None
        total, tokens = torch.zeros((), device=full.device), len(full)
        for start in range(0, tokens, ROWS):
            part = slice(start, start + ROWS)
            p, q = (logits[part].float().log_softmax(-1) for logits in (full, compressed))
            difference, p = p - q, p.exp_()
            total += (p * difference).sum()
            if gradient is not None:
                gradient[part] = q.exp_().sub_(p).div_(tokens)
        ctx.save_for_backward(gradient)
        return total / tokens

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, torch.Tensor]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * upstream.to(gradient.dtype)
