"""Clamp theta to its bounds during training, and read the optimizer's fp32 copy of theta.

Theta contains the learned parameters of the positional embedding, [heads, parameters per head].
Parameters that all heads share are stored once, in a second tensor [1, shared parameters].
Theta's master is the fp32 copy that the optimizer updates. After each optimizer step, the master
and the model's copy of theta are clamped to the bounds. Each ZeRO stage stores the master in a
different place, so this module treats each stage separately.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

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

from megatron.model.embedding import trained_theta
from megatron.parallel.groups import Groups
from megatron.positional import PositionalEmbedding, bounds

LAYER = re.compile(r"^layers\.(\d+)\.")
"""The start of a parameter's name if it belongs to one layer alone."""
MOST_COLUMNS = 8
"""If theta has more columns than this, `TrainedTheta.columns` returns them all in one table."""


class TrainedTheta:
    """Theta, the learned parameters of the model's positional embedding, in a DeepSpeed engine.

    Theta has the shape [heads, parameters per head]. Under ZeRO every method is a collective, so
    all ranks of the pipeline stage must call it. A rank has no theta if the embedding has no
    learned parameters or if another pipeline stage holds them. On such a
    rank, the methods do nothing.

    Args:
        engine: the engine that trains theta.
        parameters: theta of this rank's heads, in the engine's model, and the shared columns if
            there are any; empty on a rank without theta.
        pos: the positional embedding, with the names and the bounds of theta's columns. Its
            numerics decide whether theta's fp32 master copy is clamped as well.
        groups: the job's process groups; each tensor-parallel rank holds theta of its heads.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        parameters: Sequence[nn.Parameter],
        pos: PositionalEmbedding,
        groups: Groups,
    ):
        self.engine, self.parameters, self.pos, self.groups = engine, parameters, pos, groups
        self._projected: list[Tensor] = []

    @torch.no_grad()
    def master(self) -> Tensor | None:
        """Return a clone of theta's fp32 master copy, [this rank's heads, parameters per head].

        The result is None on a rank without theta.
        """
        masters = [self._master(theta) for theta in self.parameters]
        return trained_theta(self.pos, masters) if masters else None

    @torch.no_grad()
    def master_of_all_heads(self) -> Tensor | None:
        """Return a clone of theta's fp32 master copy, [all heads, parameters per head].

        The result is None on a rank without theta.
        """
        return self._of_all_heads([self._master(theta) for theta in self.parameters])

    @torch.no_grad()
    def project(self) -> None:
        """Clamp theta to its bounds, after an optimizer step."""
        self._projected = []
        for theta, shared in zip(self.parameters, (False, True), strict=False):
            columns = [p for p in self.pos.trained_parameters if p.shared == shared]
            master_HN = self._master(theta)
            low_N, high_N = (limit.to(master_HN.device) for limit in bounds(columns))
            bounded_HN = master_HN.clamp(low_N, high_N)
            if self.pos.numerics.projects_master:
                self._set_master(theta, bounded_HN)
            is_partitioned = hasattr(theta, "ds_id")  # ZeRO-3
            with deepspeed.zero.GatheredParameters(
                [theta], modifier_rank=0, enabled=is_partitioned
            ):
                theta.data.copy_(bounded_HN)
            self._projected.append(bounded_HN)

    def columns(self) -> dict[str, Tensor]:
        """Return a dict from parameter name to the values [all heads] after the last `project`.

        If all heads share a parameter, it has one value. If several layers with the same embedding
        have their own parameters, the values are [layers, all heads]. If different embeddings have
        a parameter of the same name, the embedding's name is put before it.

        If there are more than MOST_COLUMNS names, the dict has other entries: "table" [all heads,
        parameters per head] and, if heads share parameters, "shared" [shared parameters].
        """
        theta_HN = self._of_all_heads(self._projected)
        if theta_HN is None:
            return {}
        trained = self.pos.trained_parameters
        columns: dict[tuple[str, str], list[Tensor]] = {}
        for parameter, column_H in zip(trained, theta_HN.T, strict=True):
            of_layer = LAYER.match(parameter.name)
            owner = self.pos.of_layer(int(of_layer[1]))[0].name if of_layer else ""
            values = column_H[:1] if parameter.shared else column_H
            columns.setdefault((owner, LAYER.sub("", parameter.name)), []).append(values)
        if len(columns) > MOST_COLUMNS:  # such as T5's table of buckets
            shared = torch.tensor([p.shared for p in trained], device=theta_HN.device)
            tables = {"table": theta_HN[:, ~shared]}
            return tables | ({"shared": theta_HN[0, shared]} if shared.any() else {})
        times = Counter(name for _, name in columns)
        return {
            name if times[name] == 1 else f"{owner}.{name}": torch.stack(all_H).squeeze(0)
            for (owner, name), all_H in columns.items()
        }

    def _of_all_heads(self, parts: Sequence[Tensor]) -> Tensor | None:
        if not parts:
            return None
        own_HN, *shared = parts
        return trained_theta(self.pos, [torch.cat(self.groups.model.gather(own_HN)), *shared])

    def _master(self, theta: nn.Parameter) -> Tensor:
        """Return a clone of the fp32 master copy of the parameter `theta`."""
        flat = safe_get_full_fp32_param(theta)
        if flat is None:
            return self._unsharded_master(theta).detach().float().clone()
        count, shape = (
            getattr(theta, "ds_numel", theta.numel()),
            getattr(theta, "ds_shape", theta.shape),
        )
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
        """Return theta's fp32 master copy itself, not a clone, in a run without ZeRO.

        In fp32 training, theta is its own master. In 16-bit training, the master is in the fp32
        list of DeepSpeed's optimizer.
        """
        optimizer = self.engine.optimizer
        if not isinstance(optimizer, FP16_UnfusedOptimizer):
            return theta
        for copies, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for copy, master in zip(copies, masters, strict=True):
                if copy is theta:
                    return master
        raise RuntimeError("theta is not among the optimizer's parameters")
