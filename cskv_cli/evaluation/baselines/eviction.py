"""Caches that keep some tokens and forget the others: a share of those seen so far, at every step."""

from abc import abstractmethod
from typing import Any

import torch

from cskv_cli.evaluation.baselines.cache import BaselineLayer
from cskv_cli.modeling.cskv_positions import Rows

FEWEST = 8  # tokens kept in any case, as many as have been seen


def capacity(seen: torch.Tensor, ratio: float) -> torch.Tensor:
    """Tokens kept of `seen` ones: the share that the ratio leaves, 8 at least; both [batch]."""
    kept = (seen * (1 - ratio)).round().long().clamp(min=FEWEST)
    return torch.minimum(kept, seen)


class EvictingLayer(BaselineLayer):
    """Keeps `capacity` tokens of those seen so far, the new one among them, at their own positions (rotated once).

    A token that must go is gone before the next one is read, so that never more are held than the ratio says.

    Attributes:
        keys, values: [batch, heads, slots, head_dim]; a row's tokens lie in its last slots, in the order they came.
        held: [batch], how many these are.
    """

    def __init__(self, ratio: float, rows: Rows) -> None:
        super().__init__(rows)
        self.ratio = ratio

    @abstractmethod
    def keep(self, limit: torch.Tensor, upcoming: int) -> torch.Tensor:
        """Which slots to keep, [batch, 1 or heads, slots]: `limit` [batch] of each row that holds more.

        Args:
            upcoming: 1 if a token is about to be added, which is not among the slots yet.
        """

    def make_room(self) -> torch.Tensor:
        """Let go of what the next token has no room for."""
        self._evict(capacity(self.seen(1), self.ratio) - 1, upcoming=1)
        return self.filled(1)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Add new tokens, many at first and then one at a time, and return all that are held."""
        new = key_states.shape[2]
        if not self.tokens:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self.tokens = new
            self.held = self.seen().expand(len(key_states))
            return self.keys, self.values
        if new > 1:
            raise ValueError("after its prefill this cache takes one token at a time")
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        self.tokens, self.held = self.tokens + 1, self.held + 1
        return self.keys, self.values

    def settle(self, received: torch.Tensor | None) -> None:
        """After a prefill: cut it down."""
        self._evict(capacity(self.seen(), self.ratio), upcoming=0)

    def filled(self, more: int = 0) -> torch.Tensor:
        """[batch, slots + more]: which slots hold a token, if `more` are added."""
        slots = self.keys.shape[2]
        return torch.arange(slots + more, device=self.device) >= slots - self.held[:, None]

    def _evict(self, limit: torch.Tensor, upcoming: int) -> None:
        if (self.held <= limit).all():
            return
        limit = torch.minimum(self.held, limit)
        kept = self.keep(limit, upcoming).expand(-1, self.keys.shape[1], -1)
        slots = kept.shape[-1]
        order = kept * slots + torch.arange(slots, device=self.device)  # those to be kept last, in order
        self.take(order.argsort(-1)[..., slots - int(limit.max()) :])
        self.held = limit

    def take(self, slots: torch.Tensor) -> None:
        """Keep just these slots, [batch, heads, kept]."""
        index = slots.unsqueeze(-1)
        self.keys, self.values = (
            states.gather(2, index.expand(-1, -1, -1, states.shape[-1])) for states in (self.keys, self.values)
        )
