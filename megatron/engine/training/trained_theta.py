"""Clamp theta to its bounds during training, and read the optimizer's fp32 copy of theta.

Theta [heads, columns] contains the trained parameters of the positional embedding. The module
`megatron.model.theta` describes how a model stores theta. The optimizer updates an fp32 copy of
theta, called the master. After each optimizer step, this module clamps the master and the model's
copy to the bounds. The ZeRO stage determines where the master is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.model.theta import named_theta, trained_theta
from megatron.parallel.groups import Groups
from megatron.positional import PositionalEmbedding, within_bounds


@dataclass
class TrainedTheta:
    """Access to the positional embedding's trained parameters, called theta.

    The methods return theta, or clamp theta to its bounds. All ranks of a pipeline stage must call
    each method. On a rank without theta, the methods do nothing.

    Attributes:
        engine: The engine that trains theta.
        parameters: The tensors that store theta. Empty on a rank without theta.
        pos: The model's positional embedding.
        groups: The job's process groups. Each tensor-parallel rank stores theta of its own heads.
    """

    # In a pipeline, only the first stage holds theta. The optimizer updates an fp32 copy of theta,
    # called the master. If `pos.numerics.projects_master` is false, only the model's copy of theta
    # is clamped, not the master.

    engine: deepspeed.DeepSpeedEngine
    parameters: Sequence[nn.Parameter]
    pos: PositionalEmbedding
    groups: Groups
    _projected: list[Tensor] = field(default_factory=list, init=False)

    @torch.no_grad()
    def master(self) -> Tensor | None:
        """Return a copy of the fp32 master of theta, [this rank's heads, parameters per head].

        Theta is the positional embedding's trained parameters. The result is None on a rank without
        theta.
        """
        masters = [self._master(theta) for theta in self.parameters]
        return trained_theta(self.pos, masters) if masters else None

    @torch.no_grad()
    def master_of_all_heads(self) -> Tensor | None:
        """Return a copy of the fp32 master of theta, [all heads, parameters per head].

        Theta is the positional embedding's trained parameters. The result is None on a rank without
        theta.
        """
        return self._of_all_heads([self._master(theta) for theta in self.parameters])

    @torch.no_grad()
    def project(self) -> None:
        """Project theta, the positional embedding's trained parameters: clamp it to its bounds."""
        self._projected = []
        for theta, shared in zip(self.parameters, (False, True), strict=False):
            columns = [p for p in self.pos.trained_parameters if p.shared == shared]
            master_HN = self._master(theta)
            bounded_HN = within_bounds(master_HN, columns)
            if self.pos.numerics.projects_master:
                self._set_master(theta, bounded_HN)
            cut = hasattr(theta, "ds_id")  # ZeRO-3
            with deepspeed.zero.GatheredParameters([theta], modifier_rank=0, enabled=cut):
                theta.data.copy_(bounded_HN)
            self._projected.append(bounded_HN)

    def columns(self) -> dict[str, Tensor]:
        """Return the columns of theta, the positional embedding's trained parameters, by name.

        Each column contains the values of all heads. The dict is empty on a rank without theta.
        """
        # The values are those after the last call of `project`. The dict is also empty before its
        # first call.
        theta_HN = self._of_all_heads(self._projected)
        return {} if theta_HN is None else named_theta(self.pos, theta_HN)

    def _of_all_heads(self, parts: Sequence[Tensor]) -> Tensor | None:
        if not parts:
            return None
        own_HN, *shared = parts
        return trained_theta(self.pos, [torch.cat(self.groups.model.gather(own_HN)), *shared])

    def _master(self, theta: nn.Parameter) -> Tensor:
        """Return a copy of the fp32 values that the optimizer updates for the parameter `theta`."""
        flat = safe_get_full_fp32_param(theta)
        if flat is None:
            return self._unsharded_master(theta).detach().float().clone()
        count = getattr(theta, "ds_numel", theta.numel())
        shape = getattr(theta, "ds_shape", theta.shape)
        return flat.detach().clone().view(-1)[:count].view(shape)

    def _set_master(self, theta: nn.Parameter, value_HN: Tensor) -> None:
        if hasattr(theta, "ds_id"):  # ZeRO-3
            # The ranks' parts have one size, so the last parts are padded if the number of ranks
            # does not divide theta. DeepSpeed's `safe_set_full_fp32_param` fails for such a part.
            size: int = theta.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
            padding = size * self.groups.replica_size - value_HN.numel()
            parts = F.pad(value_HN.flatten(), (0, padding)).split(size)
            safe_set_local_fp32_param(theta, parts[self.groups.replica_rank])
        elif hasattr(theta, "_hp_mapping"):  # ZeRO-1 and 2
            safe_set_full_fp32_param(theta, value_HN)
        else:
            self._unsharded_master(theta).data.copy_(value_HN)

    def _unsharded_master(self, theta: nn.Parameter) -> Tensor:
        """Return the fp32 tensor that the optimizer updates for `theta`, in a run without ZeRO."""
        # The result is not a copy. In fp32 training, the result is `theta` itself.
        optimizer = self.engine.optimizer
        if not isinstance(optimizer, FP16_UnfusedOptimizer):
            return theta
        for copies, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for copy, master in zip(copies, masters, strict=True):
                if copy is theta:
                    return master
        raise RuntimeError("theta is not among the optimizer's parameters")
