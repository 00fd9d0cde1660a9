"""Train hidden matrices with torch's Muon, and all other parameters with AdamW, in one optimizer.

As Muon's author recommends (kellerjordan.github.io/posts/muon), AdamW trains the embeddings, the
output layer, norms and biases. The update of a matrix is scaled to the size of an AdamW update
(arXiv 2502.16982, `match_rms_adamw`), so Muon and AdamW use the same learning rate and weight
decay.

Muon needs the whole momentum matrix to compute an update, because it makes this matrix orthogonal.
But ZeRO-1 concatenates all matrices and gives each data-parallel rank one flat slice, which may
begin or end within a matrix. Each rank keeps the momentum of its slice. Before an update, the ranks
gather the slices, and each rank computes the update of every matrix that its slice touches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.groups import Groups


class MuonWithAdamW(torch.optim.Optimizer):
    """An optimizer that trains the groups with `muon` true by Muon, and the others by AdamW.

    Args:
        groups: the result of `parameter_groups`.
        lr: the learning rate of Muon and of AdamW.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        momentum: Muon's momentum.
        ranks: the process groups of the job. ZeRO-1 gives each rank of `ranks.replicas` one slice.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        ranks: Groups,
    ):
        self.adamw = torch.optim.AdamW([g for g in groups if not g["muon"]], lr=lr, fused=True)
        self.muon = torch.optim.Muon(
            [g for g in groups if g["muon"]], lr=lr, adjust_lr_fn="match_rms_adamw"
        )
        self.shapes = {g["name"]: [p.shape for p in g["params"]] for g in groups if g["muon"]}
        self.ranks = ranks
        own = {"betas": betas, "eps": eps, "fused": True}
        groups = [g | ({"momentum": momentum} if g["muon"] else own) for g in groups]
        super().__init__(groups, {"lr": lr, "muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient."""
        assert closure is None
        for part, is_muon in ((self.adamw, False), (self.muon, True)):
            # DeepSpeed replaces parameters, and loading a checkpoint replaces groups and state.
            groups = [{**part.defaults, **g} for g in self.param_groups if g["muon"] is is_muon]
            if is_muon:
                for group in [g for g in groups if g["params"][0].ndim == 1]:
                    self._step_slice(group)
                groups = [g for g in groups if g["params"][0].ndim == 2]
            part.param_groups, part.state = groups, self.state
            part.step()

    def _step_slice(self, group: dict[str, Any]) -> None:
        """Update a flat slice of several matrices, by the formulas of `torch.optim.Muon`."""
        (slice_,) = group["params"]
        if slice_.grad is None:
            return
        state = self.state[slice_]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(slice_.grad)
        momentum = state["momentum_buffer"].lerp_(slice_.grad, 1 - group["momentum"])
        update = slice_.grad.lerp(momentum, group["momentum"])
        whole = self._gather(update.to(torch.bfloat16))  # Muon orthogonalizes in bf16
        start, size = self.ranks.replica_rank * slice_.numel(), slice_.numel()
        slice_.mul_(1 - group["lr"] * group["weight_decay"])
        offset = 0
        for shape in self.shapes[group["name"]]:
            first, last = max(offset, start), min(offset + shape.numel(), start + size)
            if first < last:
                matrix = whole[offset : offset + shape.numel()].view(shape)
                change = self._orthogonal(matrix, group["lr"], slice_.dtype).flatten()
                slice_[first - start : last - start] += change[first - offset : last - offset]
            offset += shape.numel()

    def _gather(self, piece: Tensor) -> Tensor:
        if self.ranks.replica_size == 1:
            return piece
        whole = piece.new_empty(piece.numel() * self.ranks.replica_size)
        dist.all_gather_into_tensor(whole, piece, group=self.ranks.replicas)
        return whole

    @staticmethod
    def _orthogonal(matrix: Tensor, lr: float, dtype: torch.dtype) -> Tensor:
        """Return the change that Muon makes to a weight matrix whose momentum is `matrix`."""
        change = nn.Parameter(torch.zeros_like(matrix, dtype=dtype))
        change.grad = matrix.to(dtype)
        settings = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        torch.optim.Muon([change], lr, adjust_lr_fn="match_rms_adamw", **settings).step()
        return change.detach()
