"""Theta during training: its fp32 master, its bounds, its ranges in the log.

After each optimizer step a projection clamps the fp32 master and the model's copy to the bounds.
Each ZeRO stage stores the master in another place, hence the cases below.
"""

from __future__ import annotations

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from megatron.parallel.groups import Groups
from megatron.positional import PositionalEmbedding

MOST_COLUMNS = 4
"""Parameters per head that the log shows by name; larger tables are shown as one."""


class TrainedTheta:
    """The parameters of the positional kernel, [heads, n], inside one DeepSpeed engine.

    Under ZeRO every method is a collective: all ranks of the stage must call it. Where the rank has
    no theta (nothing is learned, or another pipeline stage holds it) the methods do nothing.

    Args:
        engine: trains theta.
        parameter: theta of this rank's heads, in the engine's model; None where there is none.
        pos: gives the names and the bounds of the columns; its numerics decide whether the bounds
            hold for the master too.
        groups: the tensor-parallel group holds the other heads.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        parameter: nn.Parameter | None,
        pos: PositionalEmbedding,
        groups: Groups,
    ):
        self.engine, self.parameter, self.pos, self.groups = engine, parameter, pos, groups
        self._projected_HN: Tensor | None = None

    @torch.no_grad()
    def master(self) -> Tensor | None:
        """A copy of the fp32 master [heads of this rank, n]."""
        theta = self.parameter
        if theta is None:
            return None
        flat = safe_get_full_fp32_param(theta)
        if flat is None:
            return self._unsharded_master(theta).detach().float().clone()
        count, shape = (
            getattr(theta, "ds_numel", theta.numel()),
            getattr(theta, "ds_shape", theta.shape),
        )
        return flat.detach().clone().view(-1)[:count].view(shape)

    def master_of_all_heads(self) -> Tensor | None:
        """A copy of the fp32 master [heads of the model, n]."""
        master_HN = self.master()
        return None if master_HN is None else self._all_heads(master_HN)

    @torch.no_grad()
    def project(self) -> None:
        """Clamp the columns to their bounds."""
        theta, master_HN = self.parameter, self.master()
        if theta is None or master_HN is None:
            return
        low_N, high_N = self.pos.bounds()
        bounded_HN = master_HN.clamp(low_N.to(master_HN.device), high_N.to(master_HN.device))
        if self.pos.numerics.projects_master:
            self._set_master(theta, bounded_HN)
        is_partitioned = hasattr(theta, "ds_id")  # ZeRO-3
        with deepspeed.zero.GatheredParameters([theta], modifier_rank=0, enabled=is_partitioned):
            theta.data.copy_(bounded_HN)
        self._projected_HN = bounded_HN

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Column name -> (least, largest) over all heads, after the newest projection."""
        if self._projected_HN is None:
            return {}
        theta_HN = self._all_heads(self._projected_HN)
        names = [parameter.name for parameter in self.pos.parameters]
        if len(names) > MOST_COLUMNS:  # such as T5's
            columns = {"table": theta_HN}
        else:
            columns = dict(zip(names, theta_HN.T, strict=True))
        return {name: (x.min().item(), x.max().item()) for name, x in columns.items()}

    def _all_heads(self, theta_HN: Tensor) -> Tensor:
        return torch.cat(self.groups.model.gather(theta_HN))

    def _set_master(self, theta: nn.Parameter, value_HN: Tensor) -> None:
        if hasattr(theta, "ds_id") or hasattr(theta, "_hp_mapping"):  # sharded by ZeRO-3; ZeRO-1, 2
            safe_set_full_fp32_param(theta, value_HN)
        else:
            self._unsharded_master(theta).data.copy_(value_HN)

    def _unsharded_master(self, theta: nn.Parameter) -> Tensor:
        """ZeRO-0: theta itself in fp32, or its counterpart in the 16-bit optimizer's fp32 list."""
        optimizer = self.engine.optimizer
        if not isinstance(optimizer, FP16_UnfusedOptimizer):
            return theta
        for copies, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for copy, master in zip(copies, masters, strict=True):
                if copy is theta:
                    return master
        raise RuntimeError("theta is not among the optimizer's parameters")
