"""Build the DeepSpeed engine of a training job from its config."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from megatron.config import Config
from megatron.engine.model_shape import numerics_of, sums_in
from megatron.engine.training.compiled import compile_model
from megatron.engine.training.optimizer import build_optimizer, optimizer_kind, parameter_groups
from megatron.engine.training.schedule import AnnealingLR, schedule_of
from megatron.numerics import WIDE, Numerics
from megatron.parallel.groups import Groups

REDUCE_BUCKET_SIZE = 5 * 10**8
"""DeepSpeed's default for `reduce_bucket_size`, the number of gradient elements in a bucket."""


def job_engine(
    config: Config, model: nn.Module, groups: Groups
) -> tuple[deepspeed.DeepSpeedEngine, AnnealingLR]:
    """Wrap `model` in a DeepSpeed engine; return the engine and its learning-rate scheduler."""
    c = config
    if c.training.torch_compile:
        compile_model(model, c.training.torch_compile_mode)
    optimizer = build_optimizer(
        optimizer_of(c)[0], parameter_groups(model, c.optimizer), c.optimizer, groups
    )
    annealing = AnnealingLR(
        optimizer, schedule_of(c), use_checkpoint=c.lr.use_checkpoint_lr_scheduler
    )
    settings = engine_config(c, groups.replica_size)
    numerics = numerics_of(config)
    return build_engine(model, optimizer, annealing, settings, groups, numerics=numerics), annealing


def optimizer_of(config: Config) -> tuple[str, str]:
    """Return (kind of optimizer that the config selects, remark for the log)."""
    c = config
    return optimizer_kind(c.optimizer.type, c.training.precision, c.parallel.zero_stage)


def layout_of(config: Config, groups: Groups) -> dict[str, Any]:
    """Return the settings that determine the format of a checkpoint's files, as JSON values.

    A run with the same settings can load the files without converting them.
    """
    parallel, frozen = config.parallel, config.optimizer.theta_frozen
    size = parallel.zero.get("sub_group_size", 10**9)
    return {
        "data_parallel_size": groups.data_size,
        "model_parallel_size": groups.model.size,
        "pipe_parallel_size": groups.pipe_size,
        "context_parallel_size": groups.context.size,
        "zero_stage": parallel.zero_stage,
        "sub_group_size": size if parallel.zero_stage == 3 and size != 10**9 else None,
        "precision": config.training.precision,
        "optimizer": optimizer_of(config)[0],
        "weight_decay_positional": config.optimizer.weight_decay_positional,
        "theta_lr_multiplier": config.optimizer.theta_lr_multiplier,
        "theta_frozen": list(frozen) if isinstance(frozen, tuple) else frozen,
    }


def engine_config(config: Config, replicas: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration as a dictionary.

    Args:
        replicas: The number of replicas of the model. The replicas read different sequences or,
            with context parallelism, different tokens of the same sequences.
    """
    batch, keys = config.batch, config.to_flat_dict()
    micro, accumulation = batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * replicas,
        # Parts of DeepSpeed clip at 1.0 if this entry is missing.
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_optimization": keys["zero_optimization"],
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it waits for the GPU twice a micro-batch
        "bf16": {"enabled": config.training.precision == "bf16"},
        "fp16": keys["fp16"],
        # With partitioning, only the first tensor that is sent between pipeline stages may have a
        # gradient. Theta is the second tensor.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "flops_profiler": keys["flops_profiler"],
        "communication_data_type": sums_in(config),
        "data_types": keys.get("data_types"),
    }
    # DeepSpeed takes a missing entry for its default, but not one without a value.
    return {name: value for name, value in settings.items() if value is not None}


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: AnnealingLR,
    config: dict[str, Any],
    groups: Groups,
    *,
    numerics: Numerics = WIDE,
) -> deepspeed.DeepSpeedEngine:
    """Wrap model, optimizer and learning-rate scheduler in a DeepSpeed engine.

    Args:
        config: DeepSpeed's configuration.
        numerics: The rules for rounding, and for Adam's bias correction.
    """
    # In the released code, Adam's bias correction counts an extra first step without gradients.
    # It matters only in 16-bit training without ZeRO.
    # To allocate the optimizer's state, DeepSpeed takes a step with zero gradients. The learning
    # rate is zero in that step, so that no weight changes.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    # DeepSpeed allocates the whole bucket, however small the model is.
    zero = config["zero_optimization"]
    size = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    bucket = {"reduce_bucket_size": min(size, zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE))}
    config = config | {"zero_optimization": zero | bucket}
    needs_mpu = groups.model.size > 1 and groups.pipe_size == 1  # a pipeline has its own `mpu`
    mpu = mpu_of(groups) if needs_mpu else None
    deepspeed.utils.groups.mpu = mpu  # otherwise DeepSpeed would keep the previous engine's `mpu`
    # DeepSpeed looks whether the optimizer is its own Muon, which has functions that are compiled.
    # This project has another Muon, so it spares the second that the import of the compiler takes.
    with mock.patch("deepspeed.runtime.compiler.compile", lambda: lambda function: function):
        from deepspeed.runtime.zero.muon import original_muon  # noqa: F401
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,  # pyright: ignore[reportArgumentType]  any class with its methods
        config=config,
        mpu=mpu,
    )
    wrapped = engine.optimizer
    if isinstance(wrapped, FP16_UnfusedOptimizer) and not numerics.published:
        wrapped.optimizer.state.clear()  # 16-bit training without ZeRO
    schedule.write()
    return engine


def mpu_of(groups: Groups) -> SimpleNamespace:
    """Return the "model parallel unit" (mpu) of a DeepSpeed engine.

    The methods of the unit return ranks and process groups. DeepSpeed defines the method names. In
    these names, "model parallel" and "tensor model parallel" mean tensor parallel. "Data parallel"
    means the group `replicas` of `Groups`.
    """
    tensor = groups.model.rank, groups.model.size, groups.model.group
    data = groups.replica_rank, groups.replica_size, groups.replicas
    mpu = SimpleNamespace()
    mpu.get_data_parallel_group_ranks = partial(dist.get_process_group_ranks, groups.replicas)
    for kind, answers in {"model": tensor, "tensor_model": tensor, "data": data}.items():
        for name, answer in zip(("rank", "world_size", "group"), answers, strict=True):
            setattr(mpu, f"get_{kind}_parallel_{name}", lambda answer=answer: answer)
    return mpu
