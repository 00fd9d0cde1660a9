"""Define the config sections of the parallel layout and of the checkpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron.config.choices import DistributedBackend, Precision
from megatron.config.fields import (
    Degree,
    Flag,
    Frozen,
    FrozenDict,
    Key,
    Positive,
    Steps,
    Text,
    whole_number,
)
from megatron.config.sections.base import Section


class ParallelConfig(Section):
    pipe_parallel_size: Degree = 1
    model_parallel_size: Degree = 1  # tensor parallelism
    sequence_parallel: Flag = False  # tensor-parallel ranks split positions outside sharded layers
    context_parallel_size: Degree = 1  # Ulysses: number of ranks that share one sequence
    zero_stage: Annotated[
        int, Key("zero_optimization.stage"), BeforeValidator(whole_number(0, 3, write="e.g. 1"))
    ] = 1
    zero: Annotated[Frozen, Key("zero_optimization")] = Field(default_factory=FrozenDict)
    distributed_backend: DistributedBackend | None = None  # None: nccl on a GPU, gloo without one
    # Not in GPT-NeoX: the seconds without a sign of life after which a rank counts as lost.
    heartbeat_timeout: Annotated[
        int, BeforeValidator(whole_number(5, write="seconds, e.g. 300"))
    ] = 300
    fp32_allreduce: Flag = False
    communication_data_type: Precision | None = None
    world_size: Annotated[Positive, Key(None)] = 1
    data_parallel_size: Annotated[Positive, Key(None)] = 1


class CheckpointConfig(Section):
    save: Text | None = None
    load: Text | None = None
    save_interval: Positive | None = None
    keep_last_n_checkpoints: Positive | None = None
    extra_save_iters: Steps = ()
    async_save: Flag = False  # not in GPT-NeoX: copy the state, and write it beside training
    finetune: Flag = False
