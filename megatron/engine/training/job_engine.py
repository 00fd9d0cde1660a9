"""The engine of one job: optimizer, schedule and DeepSpeed's settings from the config's keys."""

from __future__ import annotations

import deepspeed
from torch import nn

from megatron.config import Config
from megatron.engine.build import schedule_of
from megatron.engine.training.optimizer import (
    build_engine,
    build_optimizer,
    engine_config,
    parameter_groups,
)
from megatron.engine.training.schedule import AnnealingLR
from megatron.parallel import Groups

FP16_OPTIONS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
)


def sub_group_size(config: Config) -> int | None:
    """Numbers that ZeRO-3 keeps in one piece of its state, where that is not DeepSpeed's default.

    Files of one size cannot be loaded as those of another.
    """
    size = config.parallel.zero.get("sub_group_size", 10**9)
    return size if config.parallel.zero_stage == 3 and size != 10**9 else None


def job_engine(
    config: Config, model: nn.Module, groups: Groups
) -> tuple[deepspeed.DeepSpeedEngine, AnnealingLR]:
    """Wrap `model` for training as the config says."""
    c = config
    optimizer = build_optimizer(
        c.optimizer.type,
        parameter_groups(
            model, c.optimizer.weight_decay, decay_theta=c.optimizer.weight_decay_positional
        ),
        lr=c.optimizer.lr,
        betas=tuple(c.optimizer.betas),
        eps=c.optimizer.eps,
        momentum=c.optimizer.momentum,
    )
    annealing = AnnealingLR(
        optimizer, schedule_of(c), use_checkpoint=c.lr.use_checkpoint_lr_scheduler
    )
    communication = "fp32" if c.parallel.fp32_allreduce else c.parallel.communication_data_type
    settings = engine_config(
        micro_batch=c.batch.train_micro_batch_size_per_gpu,
        accumulation=c.batch.gradient_accumulation_steps,
        world_size=groups.replica_size,
        precision=c.training.precision,
        gradient_clipping=c.optimizer.gradient_clipping,
        zero_stage=c.parallel.zero_stage,
        zero_options=dict(c.parallel.zero),
        grad_accum_dtype=c.training.grad_accum_dtype,
        communication_dtype=communication,
        fp16_options={key: getattr(c.training, key) for key in FP16_OPTIONS},
    )
    published = c.model.published_numerics
    engine = build_engine(model, optimizer, annealing, settings, groups, count_empty_step=published)
    return engine, annealing
