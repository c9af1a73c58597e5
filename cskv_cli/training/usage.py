"""What training takes: tokens a second, and memory at its peak."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Usage:
    """Of the training steps; scoring does not count."""

    def __init__(self) -> None:
        self._seconds, self._tokens = 0.0, 0

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """The time of a step that trains on so many tokens."""
        began = time.monotonic()
        yield
        self._seconds, self._tokens = self._seconds + time.monotonic() - began, self._tokens + tokens

    @property
    def tokens_per_second(self) -> float:
        """Of this process; 0 where it made no step."""
        return self._tokens / self._seconds if self._tokens else 0.0

    @property
    def peak_bytes(self) -> int:
        """Of the device, or of this process where that is the CPU."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def summary(self, processes: int) -> str:
        """For a progress bar."""
        return f"{self.tokens_per_second * processes:,.0f} tokens/s, {self.peak_bytes / 1e9:.1f} GB"
