"""Optimizer, its parameter groups, the engine around the model, and theta's bounds.

Weight decay follows GPT-NeoX: biases and norm weights are not decayed. Neither is theta, unless
`weight_decay_positional` says so (the published code decayed it).

Bounds on theta are a projection after the optimizer step, on the fp32 master and on the model's
copy alike. Each ZeRO stage keeps the master elsewhere, hence `project_theta`'s cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from megatron.engine.training.mpu import Mpu
from megatron.engine.training.schedule import AnnealingLR
from megatron.parallel import Groups, TensorGroup, cut_of

THETA = "embedding.theta"


def parameter_groups(
    model: nn.Module, weight_decay: float, *, decay_theta: bool = False
) -> list[dict[str, Any]]:
    """The decayed and the exempt group, {"params", "weight_decay", "name"}, always both."""
    decayed, exempt = [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        decays = decay_theta if name.endswith(THETA) else param.ndim >= 2
        (decayed if decays else exempt).append(param)
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
        {"params": exempt, "weight_decay": 0.0, "name": "not decayed"},
    ]


def build_optimizer(
    kind: str,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.0,
) -> torch.optim.Optimizer:
    """`adam` is AdamW (decoupled decay, as apex FusedAdam's default); `sgd` is plain SGD."""
    if kind == "adam":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum)
    raise ValueError(f"optimizer {kind!r} is unknown; use adam or sgd")


def engine_config(
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    precision: str,
    gradient_clipping: float,
    zero_stage: int,
    zero_options: dict[str, Any],
    grad_accum_dtype: str | None = None,
    communication_dtype: str | None = None,
    fp16_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """DeepSpeed's configuration. Clipping is always written: left out it means 1.0 in places."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * world_size,
        "gradient_clipping": gradient_clipping,
        "zero_optimization": {"stage": zero_stage, **zero_options},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", **(fp16_options or {})},
        # Partitioned, only the first tensor between stages may have a gradient; theta is another.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    if grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": grad_accum_dtype}
    if communication_dtype:
        config["communication_data_type"] = communication_dtype
    return config


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    config: dict[str, Any],
    groups: Groups | None = None,
    *,
    count_empty_step: bool = False,
) -> deepspeed.DeepSpeedEngine:
    """Wrap model, optimizer and learning-rate schedule in a DeepSpeed engine.

    `groups` are needed where the job is not data-parallel alone.

    DeepSpeed allocates optimizer state by taking a step with zero gradients. At rate zero it moves
    no weight. Without ZeRO it would still count in Adam's bias correction: that state is dropped,
    unless `count_empty_step`, as it counted in the published 16-bit training.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    sliced = groups is not None and groups.model.size > 1 and groups.pipe_size == 1
    mpu = Mpu(groups) if sliced else None  # a pipeline brings its own
    deepspeed.utils.groups.mpu = mpu  # DeepSpeed would keep an earlier engine's
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config, mpu=mpu
    )
    if hasattr(engine.optimizer, "fp32_groups") and not count_empty_step:
        engine.optimizer.optimizer.state.clear()
    schedule.write()
    return engine


HYPERPARAMETERS = ("weight_decay", "betas", "eps", "momentum")


@contextmanager
def own_hyperparameters(schedule: AnnealingLR) -> Iterator[None]:
    """Around loading a checkpoint: the optimizer keeps this run's settings, not the checkpoint's.

    The loaded groups bring those of the run that saved them, and under ZeRO its learning rate too,
    after the schedule has written the right one.
    """
    own = [
        {key: group[key] for key in HYPERPARAMETERS if key in group}
        for group in schedule.optimizer.param_groups
    ]
    yield
    for group, values in zip(schedule.optimizer.param_groups, own, strict=True):
        group.update(values)
    schedule.write()


@torch.no_grad()
def all_finite(model: nn.Module, groups: Groups) -> bool:
    """Whether every weight on every rank is a finite number."""
    local = (getattr(p, "ds_tensor", p) for p in model.parameters())
    wrong = sum((~torch.isfinite(tensor)).sum() for tensor in local)
    return groups.sum_over_job(wrong.to(groups.device)).item() == 0


@torch.no_grad()
def gradient_norm(model: nn.Module, tp: TensorGroup) -> torch.Tensor:
    """Norm of the whole model's gradient where every data-parallel rank holds it (ZeRO-0).

    In fp32: norms of 16-bit tensors taken in their own dtype are wrong by percents.
    """
    params = [param for param in model.parameters() if param.grad is not None]
    square = _square([p.grad for p in params if tp.size == 1 or cut_of(p) is None])
    if tp.size > 1:
        sliced = _square([p.grad for p in params if cut_of(p) is not None])
        square = square + torch.stack(tp.gather(sliced)).sum()
    return square.sqrt()


def mark_cut_gradients(model: nn.Module) -> None:
    """Before a step without ZeRO: mark the gradients of tensors that are cut over ranks as such.

    DeepSpeed's 16-bit optimizer sums the norm it clips by over the tensor-parallel ranks, of which
    all but the first add only what is marked. It looks for the mark of the parameters on their
    gradients, and would clip by the first rank's part.
    """
    for param in model.parameters():
        if param.grad is not None and cut_of(param) is not None:
            param.grad.model_parallel = True


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of all squares, in fp32."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float32)).square().sum()


@torch.no_grad()
def full_theta(engine: deepspeed.DeepSpeedEngine, theta: nn.Parameter) -> torch.Tensor:
    """The fp32 master of theta [heads, n], on every rank (a collective under ZeRO).

    Under tensor parallelism, of this rank's heads; see `all_heads`.
    """
    whole = safe_get_full_fp32_param(theta)
    if whole is not None:
        return whole.detach().clone().view(-1)[: _numel(theta)].view(_shape(theta))
    return _unsharded_master(engine, theta).detach().float().clone()


def all_heads(theta_HN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Theta of every head, from each tensor-parallel rank's own; every rank must call it."""
    return torch.cat(groups.model.gather(theta_HN))


@torch.no_grad()
def project_theta(
    engine: deepspeed.DeepSpeedEngine,
    theta: nn.Parameter,
    low_N: torch.Tensor,
    high_N: torch.Tensor,
    *,
    copy_only: bool = False,
) -> torch.Tensor:
    """Clamp theta's columns to [low, high] in the fp32 master and in the model's copy.

    Every rank must call it. Returns the clamped values [heads, n] in fp32.

    Args:
        copy_only: as the published code, leave the master of 16-bit training where it drifts to.
    """
    master = full_theta(engine, theta)
    bounded = torch.clamp(master, low_N.to(master.device), high_N.to(master.device))
    if copy_only:
        with deepspeed.zero.GatheredParameters([theta], 0, enabled=hasattr(theta, "ds_id")):
            theta.data.copy_(bounded)
        return bounded
    if hasattr(theta, "ds_id"):  # ZeRO-3: the parameter itself is cut over the ranks
        with deepspeed.zero.GatheredParameters([theta], modifier_rank=0):
            theta.data.copy_(bounded)
        safe_set_full_fp32_param(theta, bounded)
    elif hasattr(theta, "_hp_mapping"):  # ZeRO-1 and 2: the master is cut over the ranks
        safe_set_full_fp32_param(theta, bounded)
        theta.data.copy_(bounded)
    else:
        _unsharded_master(engine, theta).data.copy_(bounded)
        theta.data.copy_(bounded)
    return bounded


def _unsharded_master(engine: deepspeed.DeepSpeedEngine, theta: nn.Parameter) -> torch.Tensor:
    """ZeRO-0: theta itself in fp32, or its twin in the 16-bit optimizer's own list."""
    twins = getattr(engine.optimizer, "fp32_groups", None)
    if twins is None:
        return theta
    for copies, masters in zip(engine.optimizer.fp16_groups, twins, strict=True):
        for copy, master in zip(copies, masters, strict=True):
            if copy is theta:
                return master
    raise RuntimeError("theta is not among the optimizer's parameters")


def _shape(theta: nn.Parameter) -> torch.Size:
    return getattr(theta, "ds_shape", theta.shape)


def _numel(theta: nn.Parameter) -> int:
    return getattr(theta, "ds_numel", theta.numel())
