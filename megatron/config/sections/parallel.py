"""Define the config sections of the parallel layout and of the checkpoints."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron.config.choices import Precision, choice
from megatron.config.fields import (
    Count,
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
    pipe_parallel_size: Degree = 1  # number of pipeline stages
    # tensor parallelism: number of processes that divide each layer
    model_parallel_size: Degree = 1
    # tensor-parallel processes divide positions outside sharded layers
    sequence_parallel: Flag = False
    # Ulysses: number of processes that divide the positions of a sequence
    context_parallel_size: Degree = 1
    # 0 to 3; with `zero_optimization` but without a stage: 0
    zero_stage: Annotated[
        int, Key("zero_optimization.stage"), BeforeValidator(whole_number(0, 3, write="e.g. 1"))
    ] = 1
    # DeepSpeed's sizes and switches, below
    zero: Annotated[Frozen, Key("zero_optimization")] = Field(default_factory=FrozenDict)
    # default: nccl on a GPU, gloo without one
    distributed_backend: Annotated[str, choice("nccl gloo")] | None = None
    # not in GPT-NeoX: seconds without a sign of life after which a process is lost
    heartbeat_timeout: Annotated[
        int, BeforeValidator(whole_number(5, write="seconds, e.g. 300"))
    ] = 300
    fp32_allreduce: Flag = False  # sum gradients over processes in fp32
    communication_data_type: Precision | None = None  # the type of these sums; default: the model's
    world_size: Annotated[Positive, Key(None)] = 1
    data_parallel_size: Annotated[Positive, Key(None)] = 1

    @property
    def overlaps(self) -> bool:
        """Whether gradients are added beside the backward pass. In pipelines, they are not."""
        asked = self.zero.get("overlap_comm", self.zero_stage == 3)
        return bool(asked) and self.pipe_parallel_size == 1


class CheckpointConfig(Section):
    save: Text | None = None  # folder of the run: checkpoints, metrics, config.yml
    # folder of the run, or checkpoint, to continue from
    load: Text | None = None
    # steps between checkpoints; without it only the last is saved
    save_interval: Positive | None = None
    # remove older checkpoints of this run; default: keep all
    keep_last_n_checkpoints: Positive | None = None
    extra_save_iters: Steps = ()  # further steps at which to save; 0: before the first
    async_save: Flag = False  # not in GPT-NeoX: copy the state, and write it beside training
    finetune: Flag = False  # start at step 0 from the weights of `load`
    # not in GPT-NeoX: how theta of a new pos_emb starts with finetune; fit: as the old one acted
    retrofit_init: Annotated[str, choice("gentle fit drawn")] = "gentle"
    # not in GPT-NeoX: steps, below train_iters, in which a dropped rotary embedding fades out
    retrofit_anneal: Count = 0
