"""The optimizer, its parameter groups, and norms and checks over all parameters.

Weight decay follows GPT-NeoX: biases and norm weights are not decayed. Theta is not decayed either,
unless `weight_decay_positional` is set (the published code decayed it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron.engine.training.schedule import AnnealingLR
from megatron.model.embedding import THETA
from megatron.parallel.groups import Groups, TensorGroup
from megatron.parallel.sharding import sharding_of


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


HYPERPARAMETERS = ("weight_decay", "betas", "eps", "momentum")


@contextmanager
def keep_hyperparameters(schedule: AnnealingLR) -> Iterator[None]:
    """Around the loading of a checkpoint: the optimizer keeps this run's settings.

    Loading replaces them by those of the run that saved the checkpoint. Under ZeRO it replaces the
    learning rate too, after the schedule has written the right one.
    """
    kept = [
        {key: group[key] for key in HYPERPARAMETERS if key in group}
        for group in schedule.optimizer.param_groups
    ]
    yield
    for group, values in zip(schedule.optimizer.param_groups, kept, strict=True):
        group.update(values)
    schedule.write()


@torch.no_grad()
def all_finite(model: nn.Module, groups: Groups) -> bool:
    """Whether every weight on every rank is a finite number."""
    local = (getattr(p, "ds_tensor", p) for p in model.parameters())
    wrong = torch.stack([(~torch.isfinite(tensor)).sum() for tensor in local]).sum()
    return groups.sum_over_job(wrong.to(groups.device)).item() == 0


@torch.no_grad()
def gradient_norm(model: nn.Module, tp: TensorGroup) -> torch.Tensor:
    """L2 norm of the full model's gradient, in fp32, without ZeRO.

    The norm of a 16-bit tensor computed in its own dtype is wrong by percents.
    """
    gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    square = _square([grad for p, grad in gradients if tp.size == 1 or sharding_of(p) is None])
    if tp.size > 1:
        sharded = _square([grad for p, grad in gradients if sharding_of(p) is not None])
        square = square + torch.stack(tp.gather(sharded)).sum()
    return square.sqrt()


def mark_sharded_gradients(model: nn.Module) -> None:
    """Before a step without ZeRO: mark the gradients of tensor-parallel shards as such.

    DeepSpeed's 16-bit optimizer clips by a norm summed over the tensor-parallel ranks. All ranks
    but the first add only gradients that carry the mark. DeepSpeed sets the mark on parameters but
    looks for it on gradients; without this function it would clip by the first rank's norm.
    """
    for param in model.parameters():
        if param.grad is not None and sharding_of(param) is not None:
            param.grad.model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of all squares, in fp32."""
    norms = torch._foreach_norm(tensors, 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square().sum()
