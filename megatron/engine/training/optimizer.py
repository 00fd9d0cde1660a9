"""Build the optimizer and its parameter groups; compute gradient norms and check the weights.

As in GPT-NeoX, biases and norm weights have no weight decay. Theta, the learned parameters of the
positional embedding, has weight decay only if `weight_decay_positional` is set. (In the released
KERPLE code, theta always has weight decay.) If all of theta is frozen, it has no weight decay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from megatron import nvidia_apex
from megatron.config.sections.training import OptimizerConfig
from megatron.engine.errors import StartError
from megatron.engine.training.muon import MuonWithAdamW
from megatron.engine.training.schedule import AnnealingLR
from megatron.engine.training.without_compiler import without_compiler
from megatron.model.theta import is_theta
from megatron.parallel.groups import Groups, TensorGroup
from megatron.parallel.sharding import sharding_of

APEX_ADAM = ("apex.optimizers", "FusedAdam", "amp_C")
"""Apex's FusedAdam and the CUDA extension that it needs, for `nvidia_apex.find`."""


def optimizer_kind(name: str, precision: str, zero_stage: int) -> tuple[str, str]:
    """Return (kind of optimizer to build, remark for the log).

    Args:
        name: The config's `optimizer.type`.
    """
    # For `fusedadam`, the kind is apex's FusedAdam if it can be used, otherwise torch's fused Adam.
    # The remark names this choice. For other names, the kind is `name` and the remark is "".
    if name != "fusedadam":
        return name, ""
    found, why = nvidia_apex.find(*APEX_ADAM)
    if zero_stage == 0 and precision != "fp32":
        found, why = None, f"DeepSpeed's {precision} training without ZeRO does not take it"
    if found is None:
        return "adam", f"torch's fused Adam instead of apex's FusedAdam, because {why}"
    return "apex", "apex's FusedAdam"


def parameter_groups(model: nn.Module, section: OptimizerConfig) -> list[dict[str, Any]]:
    """Divide the trained parameters into groups for the optimizer.

    Returns:
        The groups, each {"params", "weight_decay", "name"}. A group with its own learning rate also
        has the entry "lr_multiplier". If the config selects Muon, each group has the entry "muon",
        which says whether Muon trains the group.

    Raises:
        StartError: A group is empty, which can happen in a pipeline stage of one block.
    """
    # The first group has weight decay, and the second has none. If theta (the positional
    # embedding's learned parameters) has its own learning rate, a third group holds theta. For
    # Muon, the last group holds the matrices of the transformer blocks.
    muon, weight_decay = section.type == "muon", section.weight_decay
    theta_lr_multiplier = section.theta_lr_multiplier
    decay_theta = section.weight_decay_positional and section.theta_frozen is not True
    decayed, exempt, theta, hidden = [], [], [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if is_theta(name) and theta_lr_multiplier != 1.0:
            theta.append(param)
        elif muon and name.startswith("layers.") and param.ndim == 2 and not is_theta(name):
            hidden.append(param)
        elif decay_theta if is_theta(name) else param.ndim >= 2:
            decayed.append(param)
        else:
            exempt.append(param)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
        {"params": exempt, "weight_decay": 0.0, "name": "not decayed"},
    ]
    if theta_lr_multiplier != 1.0:
        own = {"lr_multiplier": theta_lr_multiplier, "weight_decay": weight_decay * decay_theta}
        if not theta:  # pipeline stages have equally many groups, and ZeRO accepts no empty one
            spare, decay = (exempt, 0.0) if len(exempt) > 1 else (decayed, weight_decay)
            theta, own = [spare.pop()], {"lr_multiplier": 1.0, "weight_decay": decay}
        groups.append({"params": theta, "name": "theta", **own})
    if muon:
        if not decayed and len(exempt) > 1:  # a pipeline stage with blocks only
            groups[0] |= {"params": [exempt.pop()], "weight_decay": 0.0}
        groups.append({"params": hidden, "weight_decay": weight_decay, "name": "hidden matrices"})
        for group in groups:
            group["muon"] = group["params"] is hidden
    if not all(group["params"] for group in groups):
        raise StartError(
            "pipe_parallel_size: a stage has too few norms and biases for the optimizer's groups; "
            "write fewer stages, use_bias_in_mlp: true or optimizer.type: adam"
        )
    return groups


def build_optimizer(
    kind: str, groups: list[dict[str, Any]], section: OptimizerConfig, ranks: Groups | None = None
) -> torch.optim.Optimizer:
    """Build an optimizer for parameter groups.

    Args:
        kind: `adam` is AdamW, `sgd` is SGD, `apex` is apex's FusedAdam. `muon` is Muon for hidden
            matrices and AdamW for the others.
        groups: The parameter groups.
        section: The learning rate, Adam's betas and epsilon, and the momentum of SGD or Muon.
        ranks: The process groups of the job, which Muon needs.
    """
    # `adam` has decoupled weight decay as in apex's FusedAdam. `groups` comes from
    # `parameter_groups`.
    beta1, beta2 = section.betas
    adam: dict[str, Any] = {"lr": section.lr, "betas": (beta1, beta2), "eps": section.eps}
    if kind == "adam":
        return without_compiler(torch.optim.AdamW)(groups, **adam, fused=True)
    if kind == "apex":
        fused, _ = nvidia_apex.find(*APEX_ADAM)
        return fused(groups, **adam, adam_w_mode=True)
    if kind == "sgd":
        return without_compiler(torch.optim.SGD)(groups, lr=section.lr, momentum=section.momentum)
    if kind == "muon":
        assert ranks is not None
        return MuonWithAdamW(
            groups, **adam, momentum=section.momentum, split_fused=section.split_fused, ranks=ranks
        )
    raise ValueError(f"optimizer {kind!r} is unknown; use adam, sgd or muon")


HYPERPARAMETERS = ("weight_decay", "betas", "eps", "momentum", "lr_multiplier")


ENGINE_SETTINGS = ("clip_grad", "dynamic_loss_scale", "loss_scaler", "loss_scale_config")
SCALE_STATE = {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
"""The attributes of DeepSpeed's dynamic loss scaler that are state, not settings."""


@contextmanager
def keep_hyperparameters(schedule: AnnealingLR, engine_optimizer: Any) -> Iterator[None]:
    """Restore this run's learning rate and hyperparameters (such as betas) after the `with` block.

    The block loads a checkpoint, which replaces these values. The largest norm of the gradients and
    the settings of the loss scale are restored, too; a dynamic scale continues from its old value.

    Args:
        engine_optimizer: DeepSpeed's wrapper of the optimizer.
    """
    here = vars(engine_optimizer)
    own = {key: copy(here[key]) for key in ENGINE_SETTINGS if key in here}
    kept = [
        {key: group[key] for key in HYPERPARAMETERS if key in group}
        for group in schedule.optimizer.param_groups
    ]
    yield
    for group, values in zip(schedule.optimizer.param_groups, kept, strict=True):
        group.update(values)
    for key in {"loss_scaler", "loss_scale_config"} & own.keys():
        mine, loaded = vars(own[key]), vars(here[key])
        dynamic = None not in (mine.get("last_overflow_iter"), loaded.get("last_overflow_iter"))
        state = SCALE_STATE if dynamic else {"cur_iter"}
        mine.update((each, loaded[each]) for each in state & loaded.keys())
        least = mine.get("min_scale") or mine.get("min_loss_scale") or 0
        mine["cur_scale"] = max(mine["cur_scale"], least)
    here.update(own)
    schedule.write()


@torch.no_grad()
def all_finite(model: nn.Module, groups: Groups) -> bool:
    """Return whether every weight on every rank is finite. Every rank must call this function."""
    local = (_local_elements(p, groups) for p in model.parameters())
    wrong = torch.stack([(~torch.isfinite(tensor)).sum() for tensor in local]).sum()
    return groups.sum_over_job(wrong.to(groups.device)).item() == 0


def _local_elements(parameter: nn.Parameter, groups: Groups) -> torch.Tensor:
    """Return the elements of `parameter` that this rank stores."""
    # Under ZeRO-3, these are a slice.
    piece = getattr(parameter, "ds_tensor", None)
    if piece is None:
        return parameter
    whole: int = parameter.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
    # Slices have one size, so the last slices may extend past the parameter's end.
    return piece[: max(0, whole - groups.replica_rank * piece.numel())]


@torch.no_grad()
def gradient_norm(model: nn.Module, tp: TensorGroup) -> torch.Tensor:
    """Return the L2 norm of the full model's gradient, computed in fp32, for training without ZeRO.

    All ranks of `tp` must call this function.

    Args:
        model: This rank's tensor-parallel shard of the model.
        tp: The tensor-parallel group.
    """
    gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    square = _square([grad for p, grad in gradients if tp.size == 1 or sharding_of(p) is None])
    if tp.size > 1:
        sharded = _square([grad for p, grad in gradients if sharding_of(p) is not None])
        square = square + torch.stack(tp.gather(sharded)).sum()
    return square.sqrt()


def mark_sharded_gradients(model: nn.Module) -> None:
    """Mark the gradients of tensor-parallel shards, so that DeepSpeed computes the right norm."""
    # DeepSpeed's 16-bit optimizer needs the attribute `model_parallel` on them before a step
    # without ZeRO.
    # All tensor-parallel ranks but the first add only marked gradients to the norm. DeepSpeed
    # itself marks parameters, not gradients.
    for param in model.parameters():
        if param.grad is not None and sharding_of(param) is not None:
            param.grad.model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all numbers in `tensors`, in fp32."""
    norms = torch._foreach_norm(tensors, 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square().sum()
