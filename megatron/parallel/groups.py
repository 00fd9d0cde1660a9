"""Who talks to whom: frozen values that are passed to whoever needs them.

Ranks are counted as in GPT-NeoX and DeepSpeed's topology, tensor-parallel ranks innermost:

    rank = (pipe_rank * data_size + data_rank) * model_size + model_rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that hold one layer together, each a slice of it (Megatron's tensor parallelism).

    Attributes:
        group: their process group; None where a rank holds everything itself.
        rank, size: position among them.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor` (of one shape), in the order of ranks; without gradients."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor.detach()).contiguous() for _ in range(self.size)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=self.group)
        return parts


ALONE = TensorGroup()
"""No tensor parallelism."""


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank.

    Attributes:
        rank, world_size: position in the whole job.
        data: the data-parallel process group; None stands for the world.
        data_rank, data_size: position in that group.
        device: where this rank's tensors live.
        model: the tensor-parallel group.
        pipe: the group of this rank's pipeline; None where there is one stage.
        pipe_rank, pipe_size: this rank's stage, and how many there are.
    """

    rank: int
    world_size: int
    data: dist.ProcessGroup | None
    data_rank: int
    data_size: int
    device: torch.device
    model: TensorGroup = ALONE
    pipe: dist.ProcessGroup | None = None
    pipe_rank: int = 0
    pipe_size: int = 1

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes logs and shared files."""
        return self.rank == 0

    def divided(self, *, model_size: int = 1, pipe_size: int = 1) -> Groups:
        """The groups of this job cut into tensor- and pipeline-parallel parts.

        Every rank must call it, with the same sizes; new process groups are made.

        Raises:
            ValueError: the world is not a multiple of the parts.
        """
        if model_size == pipe_size == 1:
            return self
        if self.world_size % (model_size * pipe_size):
            raise ValueError(
                f"{self.world_size} ranks cannot form groups of {pipe_size} stages x {model_size}"
            )
        data_size = self.world_size // (model_size * pipe_size)
        model_rank = self.rank % model_size
        data_rank = self.rank // model_size % data_size
        pipe_rank = self.rank // (model_size * data_size)

        def rank_at(pipe: int, data: int, model: int) -> int:
            return (pipe * data_size + data) * model_size + model

        pipes, datas, models = range(pipe_size), range(data_size), range(model_size)
        data = self._own([[rank_at(p, d, m) for d in datas] for p in pipes for m in models])
        model = self._own([[rank_at(p, d, m) for m in models] for p in pipes for d in datas])
        pipe = None
        if pipe_size > 1:
            pipe = self._own([[rank_at(p, d, m) for p in pipes] for d in datas for m in models])
        return replace(
            self,
            data=data,
            data_rank=data_rank,
            data_size=data_size,
            model=TensorGroup(model, model_rank, model_size),
            pipe=pipe,
            pipe_rank=pipe_rank,
            pipe_size=pipe_size,
        )

    def _own(self, members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Make the groups that `members` lists; returns the one that this rank is in."""
        made = [(ranks, dist.new_group(list(ranks))) for ranks in members]
        return next(group for ranks, group in made if self.rank in ranks)

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over the data-parallel ranks and return it."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data)
        return tensor

    def sum_over_job(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over all ranks and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank of the job."""
        if self.world_size > 1:
            dist.barrier()

    def gather_from_pipe(self, value: Any) -> list[Any]:
        """Each stage's `value`, on every stage (pickled: for small things only)."""
        if self.pipe_size == 1:
            return [value]
        found: list[Any] = [None] * self.pipe_size
        dist.all_gather_object(found, value, group=self.pipe)
        return found

    def union_over_pipe(self, value: dict[str, Any]) -> dict[str, Any]:
        """The entries of all stages' `value`."""
        return {key: each for stage in self.gather_from_pipe(value) for key, each in stage.items()}


def build_groups(device: torch.device) -> Groups:
    """Groups of the running job; a process that joined no group is a job of one."""
    if not dist.is_initialized():
        return Groups(0, 1, None, 0, 1, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    return Groups(rank, size, None, rank, size, device)
