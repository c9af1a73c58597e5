"""The processes that `accelerate launch` started, or this one alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=7)  # some stages are process 0's alone, and half an hour is too short a wait for them


class Workers:
    """This process among those that share the work.

    Attributes:
        rank: 0 to count - 1; process 0 alone writes and prints.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def every(self, items: int) -> range:
        """The items that are this process's, one in `count`."""
        return range(self.rank, items, self.count)

    def part(self, items: int) -> slice:
        """The items that are this process's, in one piece."""
        return slice(self.rank * items // self.count, (self.rank + 1) * items // self.count)

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank."""
        if self.count == 1:
            return [value]
        values = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def told(self, value: Any) -> Any:
        """The value that process 0 has."""
        if self.count == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told)
        return told[0]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The others come in when process 0 has gone out."""
        if not self.main:
            self.wait()
        yield
        if self.main:
            self.wait()


@cache
def workers() -> Workers:
    """The processes of this launch, connected."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Workers(0, 1)
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    return Workers(state.process_index, state.num_processes)
