"""Describe a job's process groups in frozen dataclasses.

Functions receive their groups as arguments. Ranks are numbered as in GPT-NeoX and in DeepSpeed's
topology. Tensor-parallel ranks are innermost:

    rank = ((pipe_rank * data_size + data_rank) * context_size + context_rank) * model_size
           + model_rank

Data-parallel ranks read different samples. The ranks of a context group process different positions
of the same sample. Data-parallel and context-parallel ranks have replicas of the same weights. The
engine averages the gradients over these replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorGroup:
    """A group of ranks for tensor parallelism or context parallelism.

    Attributes:
        group: The torch process group, or None for a group of one rank.
        rank: This rank's number in the group.
        size: The number of ranks in the group.
        sequence_parallel: Whether Megatron's sequence parallelism is on.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False

    @property
    def splits_sequence(self) -> bool:
        """Whether sequence parallelism is on and the group has several ranks."""
        return self.sequence_parallel and self.size > 1

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return a list of all ranks' tensors, in the order of ranks, without gradients.

        All ranks must pass a `tensor` of the same shape.
        """
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor.detach()).contiguous() for _ in range(self.size)]
        dist.all_gather(gathered, tensor.detach().contiguous(), group=self.group)
        return gathered


ALONE = TensorGroup()
"""A group of one rank, which means no parallelism."""


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank, and this rank's number in each group.

    Attributes:
        rank, world_size: This rank's number in the job, and the number of ranks.
        data: The data-parallel process group. None stands for all ranks of the job.
        data_rank, data_size: This rank's number in the data-parallel group, and the group's size.
        device: The device of this rank's tensors.
        replicas: The process group of all ranks with the same weights. None stands for all ranks of
            the job.
        model: The tensor-parallel group.
        context: The context-parallel group, which splits the sequence (Ulysses).
        pipe: The process group of this rank's pipeline, or None if there is only one stage.
        pipe_rank, pipe_size: This rank's stage, and the number of stages.
        job: The process group of all ranks of the job. None stands for torch's default group.
        wait: How long a collective of a new group waits. None stands for torch's default.
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
    # A background thread needs a group of its own. Else its collectives mix with those of training.
    job: dist.ProcessGroup | None = None
    pipe_rank: int = 0
    pipe_size: int = 1
    wait: timedelta | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank is rank 0. Only rank 0 writes logs and shared files."""
        return self.rank == 0

    def divided(
        self, *, model_size: int = 1, pipe_size: int = 1, context_size: int = 1,
        sequence_parallel: bool = False,
    ) -> Groups:  # fmt: skip
        """Return new groups, with tensor, context and pipeline parallelism of the given sizes.

        Every rank must call this method, because it creates process groups.

        Args:
            model_size: The number of tensor-parallel ranks.
            pipe_size: The number of pipeline stages.
            context_size: The number of context-parallel ranks.
            sequence_parallel: Whether Megatron's sequence parallelism is on.

        Raises:
            ValueError: The number of ranks is not a multiple of the product of the three sizes.
        """
        replica_ranks = model_size * pipe_size * context_size
        if replica_ranks == 1:
            return self
        ranks = np.arange(self.world_size).reshape(pipe_size, -1, context_size, model_size)
        ((pipe_rank, data_rank, context_rank, model_rank),) = np.argwhere(ranks == self.rank)
        return replace(
            self,
            data=self._group_along(ranks, 1),
            data_rank=int(data_rank),
            data_size=ranks.shape[1],
            replicas=self._group_along(ranks, 1, 2),
            model=TensorGroup(
                self._group_along(ranks, 3), int(model_rank), model_size, sequence_parallel
            ),
            context=TensorGroup(self._group_along(ranks, 2), int(context_rank), context_size),
            pipe=self._group_along(ranks, 0) if pipe_size > 1 else None,
            pipe_rank=int(pipe_rank),
            pipe_size=pipe_size,
        )

    def _group_along(self, ranks: np.ndarray, *axes: int) -> dist.ProcessGroup:
        """Create process groups along some axes of an array of ranks, and return this rank's group.

        The ranks of a group have different indices along these axes, and equal indices along all
        other axes.

        Args:
            ranks: All ranks of the job [pipe, data, context, model].
            axes: The axes along which the ranks of a group differ.
        """
        last = range(ranks.ndim - len(axes), ranks.ndim)
        size = math.prod(ranks.shape[axis] for axis in axes)
        members = np.moveaxis(ranks, axes, last).reshape(-1, size).tolist()
        created = [(each, dist.new_group(each, timeout=self.wait)) for each in members]
        return next(cast(dist.ProcessGroup, group) for each, group in created if self.rank in each)

    @property
    def replica_rank(self) -> int:
        """This rank's number among all ranks with the same weights."""
        return self.data_rank * self.context.size + self.context.rank

    @property
    def replica_size(self) -> int:
        """The number of ranks with the same weights."""
        return self.data_size * self.context.size

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over the data-parallel ranks, and return it."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data)
        return tensor

    def sum_over_job(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over all ranks of the job, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.job)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank of the job."""
        if self.world_size > 1:
            dist.barrier(self.job)

    def gather_from_job(self, value: Any) -> list[Any]:
        """Return a list of the values of all ranks, on every rank."""
        # Each `value` is pickled, so it should be small.
        return _gather_objects(value, self.world_size, self.job)

    def gather_from_pipe(self, value: Any) -> list[Any]:
        """Return a list of the values of all pipeline stages, on every stage."""
        return _gather_objects(value, self.pipe_size, self.pipe)

    def union_over_pipe(self, value: dict[str, Any]) -> dict[str, Any]:
        """Merge the dictionaries of all pipeline stages into one, on every stage."""
        return {key: each for stage in self.gather_from_pipe(value) for key, each in stage.items()}


def _gather_objects(value: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    if size == 1:
        return [value]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, value, group=group)
    return found


def build_groups(device: torch.device, wait: timedelta | None = None) -> Groups:
    """Return the process groups of the running job, with all ranks in one data-parallel group.

    Without torch.distributed, the process is a job of one rank.
    """
    rank, size = 0, 1
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    return Groups(rank, size, None, rank, size, device, wait=wait)
