"""The processes that `accelerate launch` started, or this one alone."""

import os
from functools import cache

import torch
import torch.distributed as dist


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

    def share(self, items: int) -> range:
        """The items that are this process's."""
        return range(self.rank, items, self.count)

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def agreed(self, value: bool) -> bool:
        """What process 0 says."""
        if self.count == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told)
        return told[0]


@cache
def workers() -> Workers:
    """The processes of this launch, connected."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Workers(0, 1)
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    return Workers(state.process_index, state.num_processes)
