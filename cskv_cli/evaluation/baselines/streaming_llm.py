"""StreamingLLM (arXiv 2309.17453): the first tokens, on which attention rests, and the most recent ones.

Tokens keep the positions they have in the text. The paper counts them anew inside the cache, which matters only for
texts longer than the model was trained on.
"""

import torch

from cskv_cli.evaluation.baselines.eviction import EvictingLayer

SINKS = 4


class StreamingLayer(EvictingLayer):
    """Four sinks and the last tokens."""

    def keep(self, limit: torch.Tensor, upcoming: int) -> torch.Tensor:
        """See `EvictingLayer.keep`."""
        slots = self.keys.shape[2]
        place = torch.arange(slots, device=self.device)
        first, recent = slots - self.held[:, None], limit[:, None] - SINKS
        kept = (place < first + SINKS) | (place >= slots - recent)
        return torch.where((self.held > limit)[:, None], kept & self.filled(), self.filled())[:, None]
