"""The experiment in the introduction of CSKV (arXiv 2409.10593): the smallest singular values of the cache removed.

Each layer's keys and values, [tokens, channels] over all heads, are replaced by their best approximation of a rank,
kept as two factors. It looks at the very cache it compresses, which no method with factors made beforehand can. Tokens
that are decoded later are exact until there are 128 of them; then all are approximated anew.
"""

from typing import Any

import torch

from cskv_cli.evaluation.baselines.cache import BaselineLayer
from cskv_cli.modeling.cskv_positions import Rows

BLOCK = 128


class _Factored:
    """A matrix of all tokens, [batch, tokens, channels]: two factors, and the rows that came after."""

    def __init__(self) -> None:
        self.left: torch.Tensor | None = None  # [batch, tokens, rank]
        self.right: torch.Tensor | None = None  # [batch, rank, channels]
        self.recent: torch.Tensor | None = None

    def append(self, states: torch.Tensor) -> None:
        states = states.transpose(1, 2).flatten(2)
        self.recent = states if self.recent is None else torch.cat([self.recent, states], dim=1)

    def all(self) -> torch.Tensor:
        return self.recent if self.left is None else torch.cat([self.left @ self.right, self.recent], dim=1)

    def factor(self, rank: int, starts: torch.Tensor) -> None:
        states = self.all()
        padding = torch.arange(states.shape[1], device=states.device) < starts[:, None]
        u, s, vh = torch.linalg.svd(states.float().masked_fill(padding[..., None], 0), full_matrices=False)
        rank = min(rank, s.shape[-1])
        self.left = (u[..., :rank] * s[:, None, :rank]).to(states.dtype)
        self.right = vh[:, :rank].to(states.dtype).clone()
        self.recent = states[:, :0].clone()


class SVDLayer(BaselineLayer):
    """Truncated keys and values of one layer.

    Attributes:
        due: the exact tokens are to be factored after this forward.
    """

    def __init__(self, rank: int, rows: Rows) -> None:
        super().__init__(rows)
        self.rank = rank
        self.factored = _Factored(), _Factored()
        self.due = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Add new tokens and return the keys and values of all; in a prefill exact ones."""
        first, new = not self.tokens, key_states.shape[2]
        self.tokens += new
        for matrix, states in zip(self.factored, (key_states, value_states), strict=True):
            matrix.append(states)
        self.due = (first and new > 1) or self.factored[0].recent.shape[1] >= BLOCK
        if first:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        heads = key_states.shape[1]
        return tuple(matrix.all().unflatten(-1, (heads, -1)).transpose(1, 2) for matrix in self.factored)

    def settle(self, received: torch.Tensor | None) -> None:
        """Factor a prefill at once, and later whenever a block of tokens is there."""
        if self.due:
            for matrix in self.factored:
                matrix.factor(self.rank, self.rows.read_exactly(0, self.device))
