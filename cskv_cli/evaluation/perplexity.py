"""Perplexity of a CSKV model next to that of its base, and how far apart their predictions are."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cskv_cli.evaluation.simulation import decode_simulation
from cskv_cli.progress import SILENT, Progress

ROWS = 512  # logits compared at a time


@dataclass
class Comparison:
    """Sums over the predicted tokens."""

    tokens: int = 0
    base_nll: float = 0.0
    cskv_nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def summary(self) -> dict:
        """Perplexities, mean KL(base || cskv) per token in nats, and the share of equal first choices."""
        return {
            "tokens": self.tokens,
            "base": {"perplexity": _exp(self.base_nll / self.tokens)},
            "cskv": {"perplexity": _exp(self.cskv_nll / self.tokens)},
            "kl": self.kl / self.tokens,
            "top1_agreement": self.agreed / self.tokens,
        }

    def add(self, base: torch.Tensor, cskv: torch.Tensor, targets: torch.Tensor) -> None:
        """Count logits [tokens, vocabulary] of both models for targets [tokens]."""
        p, q = base.float().log_softmax(-1), cskv.float().log_softmax(-1)
        self.tokens += len(targets)
        self.base_nll -= p.gather(1, targets[:, None]).double().sum().item()
        self.cskv_nll -= q.gather(1, targets[:, None]).double().sum().item()
        self.kl += (p.exp() * (p - q)).sum(-1).double().sum().item()
        self.agreed += (base.argmax(-1) == cskv.argmax(-1)).sum().item()


@torch.inference_mode()
def compare(model: PreTrainedModel, ids: torch.Tensor, progress: Progress = SILENT) -> Comparison:
    """Score windows ids [windows, tokens] one by one, as base (a plain forward) and in decode simulation."""
    total = Comparison()
    with progress.task("score", len(ids), "windows") as advance:
        for window in ids:
            inputs = window[None].to(model.device)
            base = model(inputs, use_cache=False).logits[0, :-1]
            with decode_simulation(model):
                cskv = model(inputs, use_cache=False).logits[0, :-1]
            targets = inputs[0, 1:]
            for start in range(0, len(targets), ROWS):
                part = slice(start, start + ROWS)
                total.add(base[part], cskv[part], targets[part])
            advance(1)
    return total


def _exp(mean_nll: float) -> float:
    return torch.tensor(mean_nll, dtype=torch.float64).exp().item()
