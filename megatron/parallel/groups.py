"""Who talks to whom: frozen values that are passed to whoever needs them.

Ranks are counted as in GPT-NeoX and DeepSpeed's topology, tensor-parallel ranks innermost:

    rank = ((pipe_rank * data_size + data_rank) * context_size + context_rank) * model_size
           + model_rank

Data-parallel ranks read different samples; the ranks of a context group share one sample's
positions out. To the engine both hold replicas of the same weights, whose gradients it averages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that hold one layer together, each a slice of it (Megatron's tensor parallelism).

    Attributes:
        group: their process group; None where a rank holds everything itself.
        rank, size: position among them.
        cuts_sequence: between the layers that are cut, each rank has its own part of the positions
            (Megatron's sequence parallelism).
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    cuts_sequence: bool = False

    @property
    def sequence(self) -> bool:
        """Whether this group's ranks hold different positions."""
        return self.cuts_sequence and self.size > 1

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
        replicas: the group of all data- and context-parallel ranks; None stands for the world.
        model: the tensor-parallel group.
        context: the group that cuts the sequence (Ulysses).
        pipe: the group of this rank's pipeline; None where there is one stage.
        pipe_rank, pipe_size: this rank's stage, and how many there are.
    """

    rank: int
    world_size: int
    data: dist.ProcessGroup | None
    data_rank: int
    data_size: int
    device: torch.device
    replicas: dist.ProcessGroup | None = None
    model: TensorGroup = ALONE
    context: TensorGroup = ALONE
    pipe: dist.ProcessGroup | None = None
    pipe_rank: int = 0
    pipe_size: int = 1

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes logs and shared files."""
        return self.rank == 0

    def divided(
        self, *, model_size: int = 1, pipe_size: int = 1, context_size: int = 1,
        cuts_sequence: bool = False,
    ) -> Groups:  # fmt: skip
        """The groups of this job cut into tensor-, context- and pipeline-parallel parts.

        Every rank must call it, with the same sizes; new process groups are made.

        Args:
            cuts_sequence: of the tensor-parallel group.

        Raises:
            ValueError: the world is not a multiple of the parts.
        """
        sizes = (pipe_size, -1, context_size, model_size)
        parts = model_size * pipe_size * context_size
        if parts == 1:
            return self
        if self.world_size % parts:
            raise ValueError(
                f"{self.world_size} ranks cannot form groups of {pipe_size} stages x "
                f"{context_size} x {model_size}"
            )
        ranks = np.arange(self.world_size).reshape(sizes)
        ((pipe_rank, data_rank, context_rank, model_rank),) = np.argwhere(ranks == self.rank)
        return replace(
            self,
            data=self._own(ranks, 1),
            data_rank=int(data_rank),
            data_size=ranks.shape[1],
            replicas=self._own(ranks, 1, 2),
            model=TensorGroup(self._own(ranks, 3), int(model_rank), model_size, cuts_sequence),
            context=TensorGroup(self._own(ranks, 2), int(context_rank), context_size),
            pipe=self._own(ranks, 0) if pipe_size > 1 else None,
            pipe_rank=int(pipe_rank),
            pipe_size=pipe_size,
        )

    def _own(self, ranks: np.ndarray, *axes: int) -> dist.ProcessGroup:
        """Make the groups of the ranks that differ along `axes` alone; returns this rank's."""
        last = range(ranks.ndim - len(axes), ranks.ndim)
        size = math.prod(ranks.shape[axis] for axis in axes)
        members = np.moveaxis(ranks, axes, last).reshape(-1, size).tolist()
        made = [(each, dist.new_group(each)) for each in members]
        return next(group for each, group in made if self.rank in each)

    @property
    def replica_rank(self) -> int:
        """Position in `replicas`."""
        return self.data_rank * self.context.size + self.context.rank

    @property
    def replica_size(self) -> int:
        """Data-parallel times context-parallel size."""
        return self.data_size * self.context.size

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

    def gather_from_job(self, value: Any) -> list[Any]:
        """Each rank's `value`, on every rank (pickled: for small things only)."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

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
