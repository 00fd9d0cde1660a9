"""From a validated config to the job's model and engine, plain or in a pipeline."""

from __future__ import annotations

import deepspeed
from torch import nn

from megatron.config import Config
from megatron.engine.build import attention_of, build_model, positional_of, shape_of
from megatron.engine.optim import (
    build_engine,
    build_optimizer,
    engine_config,
    parameter_groups,
)
from megatron.engine.pipeline import Pipeline
from megatron.engine.schedule import AnnealingLR, Schedule
from megatron.model import GPT
from megatron.parallel import Groups

Model = GPT | Pipeline


def build_own_part(config: Config, vocab_size: int, groups: Groups) -> Model:
    """What this rank holds of the model: its slice, or its slice of its stage."""
    if groups.pipe_size == 1:
        return build_model(
            config, vocab_size, device_type=groups.device.type, tp=groups.model
        )
    pos = positional_of(config)
    attend = attention_of(config, pos, groups.device.type)
    return Pipeline(shape_of(config, vocab_size), pos, attend, config.training.seed, groups)


def count_parameters(model: Model, groups: Groups) -> int:
    """Numbers in the whole model, tied ones once."""
    own = sum(
        getattr(p, "ds_numel", p.numel()) * getattr(p, "cut_size", 1)
        for p in model.parameters()
        if not getattr(p, "ds_pipe_replicated", False)
    )
    return sum(groups.gather_from_pipe(own))


def assemble(c: Config, model: nn.Module, groups: Groups) -> deepspeed.DeepSpeedEngine:
    """The engine that trains `model` as the config says."""
    param_groups = parameter_groups(
        model,
        c.optimizer.weight_decay,
        decay_theta=c.optimizer.weight_decay_positional,
    )
    optimizer = build_optimizer(
        c.optimizer.type,
        param_groups,
        lr=c.optimizer.lr,
        betas=tuple(c.optimizer.betas),
        eps=c.optimizer.eps,
        momentum=c.optimizer.momentum,
    )
    decay_iters = c.lr.decay_iters or max(1, c.training.train_iters)
    schedule = Schedule(
        start_lr=c.optimizer.lr,
        end_iter=decay_iters,
        warmup_iter=c.lr.warmup * decay_iters,
        decay_style=c.lr.decay_style,
        min_lr=c.lr.min_lr,
    )
    annealing = AnnealingLR(
        optimizer, schedule, use_checkpoint=c.lr.use_checkpoint_lr_scheduler
    )
    settings = engine_config(
        micro_batch=c.batch.train_micro_batch_size_per_gpu,
        accumulation=c.batch.gradient_accumulation_steps,
        world_size=groups.data_size,
        precision=c.training.precision,
        gradient_clipping=c.optimizer.gradient_clipping,
        zero_stage=c.parallel.zero_stage,
        zero_options=dict(c.parallel.zero),
        grad_accum_dtype=c.training.grad_accum_dtype,
        fp16_options=_fp16_options(c) if c.training.precision == "fp16" else None,
    )
    return build_engine(model, optimizer, annealing, settings, groups)


def _fp16_options(c: Config) -> dict[str, float]:
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis")
    return {name: getattr(c.training, name) for name in (*names, "min_loss_scale")}
