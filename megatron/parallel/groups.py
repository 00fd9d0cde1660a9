"""Who talks to whom: one frozen value that is passed to whoever needs it.

Ranks are counted as in GPT-NeoX. Only data parallelism exists so far, so the data-parallel group is
the whole world.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank.

    Attributes:
        rank, world_size: position in the whole job.
        data: the data-parallel process group; None stands for the world.
        data_rank, data_size: position in that group.
        device: where this rank's tensors live.
    """

    rank: int
    world_size: int
    data: dist.ProcessGroup | None
    data_rank: int
    data_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes logs and shared files."""
        return self.rank == 0

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over the data-parallel ranks and return it."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank of the job."""
        if self.world_size > 1:
            dist.barrier()


def build_groups(device: torch.device) -> Groups:
    """Groups of the running job; a process that joined no group is a job of one."""
    if not dist.is_initialized():
        return Groups(0, 1, None, 0, 1, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    return Groups(rank, size, None, rank, size, device)
