"""Perplexity of a method next to that of the full cache, and how far apart their predictions are.

Every token is scored as if it were decoded from the method's cache. For CSKV (and ASVD) one parallel forward simulates
that; the other methods really decode, a token at a time through their own caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from cskv_cli.evaluation.held import held_bytes
from cskv_cli.evaluation.methods import Method
from cskv_cli.evaluation.simulation import decode_simulation
from cskv_cli.modeling.modeling_cskv import CACHE
from cskv_cli.progress import SILENT, Advance, Progress

ROWS = 512  # logits compared at a time
STEPS = 64  # of decoding, before its logits are compared
BATCH_TOKENS = 8192  # windows decoded side by side


@dataclass
class Comparison:
    """Sums over the predicted tokens.

    Attributes:
        held_bytes: of the method's cache at the end of a window, per token of it.
    """

    tokens: int = 0
    base_nll: float = 0.0
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    held_bytes: float = 0.0

    def summary(self, name: str = "cskv") -> dict[str, Any]:
        """Perplexities, mean KL(base || method) per token in nats, and the share of equal first choices."""
        return {
            "tokens": self.tokens,
            "base": {"perplexity": _exp(self.base_nll / self.tokens)},
            name: {"perplexity": _exp(self.nll / self.tokens)},
            "kl": self.kl / self.tokens,
            "top1_agreement": self.agreed / self.tokens,
        }

    def add(self, base: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> None:
        """Count logits [tokens, vocabulary] of both for targets [tokens]."""
        p, q = base.float().log_softmax(-1), other.float().log_softmax(-1)
        self.tokens += len(targets)
        self.base_nll -= p.gather(1, targets[:, None]).double().sum().item()
        self.nll -= q.gather(1, targets[:, None]).double().sum().item()
        self.kl += (p.exp() * (p - q)).sum(-1).double().sum().item()
        self.agreed += (base.argmax(-1) == other.argmax(-1)).sum().item()


@torch.inference_mode()
def compare(methods: list[Method], ids: torch.Tensor, progress: Progress = SILENT) -> list[Comparison]:
    """Score windows ids [windows, tokens], by each method and by the full cache."""
    totals = [Comparison() for _ in methods]
    pairs = list(zip(methods, totals, strict=True))
    simulated = [pair for pair in pairs if pair[0].simulates]
    decoded = [pair for pair in pairs if not pair[0].simulates]
    with progress.task("score", ids.numel() * len(methods), "tokens") as advance:
        _simulate(simulated, ids, advance)
        rows = max(1, BATCH_TOKENS // ids.shape[1])
        for method, total in decoded:
            for batch in ids.split(rows):
                _decode(method, total, batch.to(method.model.device), advance)
    return totals


def _simulate(pairs: list[tuple[Method, Comparison]], ids: torch.Tensor, advance: Advance) -> None:
    for window in ids if pairs else ():
        base_model = pairs[0][0].model
        inputs = window[None].to(base_model.device)
        base = base_model(inputs, use_cache=False).logits[0, :-1]
        for method, total in pairs:
            other = base if method.name == "full" else _simulated(method, inputs)
            for part in (slice(start, start + ROWS) for start in range(0, len(base), ROWS)):
                total.add(base[part], other[part], inputs[0, 1:][part])
            advance(len(window))
    for method, total in pairs:
        cache = method.new_cache()
        method.model(ids[:1].to(method.model.device), use_cache=True, logits_to_keep=1, **{CACHE: cache})
        total.held_bytes = held_bytes(cache) / ids.shape[1]


def _simulated(method: Method, inputs: torch.Tensor) -> torch.Tensor:
    with decode_simulation(method.model):
        return method.model(inputs, use_cache=False).logits[0, :-1]


def _decode(method: Method, total: Comparison, ids: torch.Tensor, advance: Advance) -> None:
    """Decode windows ids [rows, tokens] side by side; the full cache reads them in chunks, to the same logits."""
    model, exact, cache = method.model, DynamicCache(config=method.model.config), method.new_cache()
    for chunk, targets in zip(ids.split(STEPS, dim=1), _targets(ids), strict=True):
        base = model(chunk, use_cache=True, **{CACHE: exact}).logits
        with method.ready():
            steps = [model(token, use_cache=True, **{CACHE: cache}).logits for token in chunk.split(1, dim=1)]
        known = slice(0, targets.shape[1])
        for row, other, target in zip(base, torch.cat(steps, dim=1), targets, strict=True):
            total.add(row[known], other[known], target)
        advance(chunk.numel())
    total.held_bytes = held_bytes(cache) / ids.numel()


def _targets(ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """What each chunk is to predict; of the last token of all there is nothing known."""
    return iter([ids[:, start + 1 : start + STEPS + 1] for start in range(0, ids.shape[1], STEPS)])


def _exp(mean_nll: float) -> float:
    return torch.tensor(mean_nll, dtype=torch.float64).exp().item()
