"""Our groups in the form in which DeepSpeed's plain engine asks for them."""

from __future__ import annotations

import torch.distributed as dist

from megatron.parallel import Groups


class Mpu:
    """DeepSpeed's "model parallel unit" over `Groups` without a pipeline.

    Its names are DeepSpeed's, whose data-parallel ranks are our replicas. Model parallel and tensor
    model parallel are the same here.
    """

    def __init__(self, groups: Groups):
        self.groups = groups

    def get_model_parallel_rank(self) -> int:
        return self.groups.model.rank

    def get_model_parallel_world_size(self) -> int:
        return self.groups.model.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.groups.model.group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.groups.replica_rank

    def get_data_parallel_world_size(self) -> int:
        return self.groups.replica_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.groups.replicas

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.groups.replicas)
