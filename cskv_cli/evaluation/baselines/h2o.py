"""H2O (arXiv 2306.14048): half of the budget for the most recent tokens, half for the heavy hitters.

Heavy hitters are the tokens that have got most attention so far, each key head for itself; prefill counts too. Where
several query heads share a key head their attention is averaged.
"""

import torch

from cskv_cli.evaluation.baselines.eviction import EvictingLayer


class H2OLayer(EvictingLayer):
    """See the module.

    Attributes:
        scores: [batch, heads, slots], float32, the attention that each kept token has got so far.
    """

    reads_attention = True
    scores: torch.Tensor | None = None

    def keep(self, limit: torch.Tensor, upcoming: int) -> torch.Tensor:
        """See `EvictingLayer.keep`."""
        slots = self.keys.shape[2]
        recent = (limit + upcoming) // 2 - upcoming
        place = torch.arange(slots, device=self.device)
        worth = self.scores.masked_fill(~self.filled()[:, None], -torch.inf)
        worth = worth.masked_fill((place >= slots - recent[:, None])[:, None], torch.inf)
        rank = worth.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return rank < limit[:, None, None]

    def settle(self, received: torch.Tensor | None) -> None:
        """Count the attention just given, then cut down a prefill."""
        if self.scores is not None:
            received = received + torch.nn.functional.pad(self.scores, (0, 1))
        self.scores = received
        super().settle(received)

    def take(self, slots: torch.Tensor) -> None:
        """See `EvictingLayer.take`."""
        super().take(slots)
        self.scores = self.scores.gather(2, slots)
