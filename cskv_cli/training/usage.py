"""What training takes: tokens a second, and memory at its peak."""

import resource
import sys
import time

import torch


class Usage:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._began, self._tokens = time.monotonic(), 0

    def count(self, tokens: int) -> None:
        """Some more tokens are done."""
        self._tokens += tokens

    @property
    def tokens_per_second(self) -> float:
        """Of this process."""
        return self._tokens / (time.monotonic() - self._began)

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
