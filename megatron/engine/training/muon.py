"""Train hidden matrices with Muon, and all other parameters with AdamW, in one optimizer.

    m <- momentum m + (1 - momentum) g
    u  = momentum m + (1 - momentum) g
    W <- (1 - lr weight_decay) W - 0.2 lr sqrt(max(rows, columns)) orthogonal(u)

g is the gradient of the matrix W. As Muon's author recommends (kellerjordan.github.io/posts/muon),
AdamW trains the embeddings, the output layer, norms and biases. The factor 0.2 sqrt(...) scales the
update of a matrix to the size of an AdamW update (arXiv 2502.16982), so Muon and AdamW use the same
learning rate and weight decay. The formulas are those of `torch.optim.Muon` with
`adjust_lr_fn="match_rms_adamw"`. Unlike torch's class, `MuonWithAdamW` accepts ZeRO's slices. On a
CPU, Muon computes in fp32, because bf16 products are many times slower on most CPUs.

The model fuses the matrices of queries, keys and values into one matrix. A gated MLP fuses gate and
value. Muon makes each fused part orthogonal by itself, unless `split_fused` is false.

Muon needs the whole momentum matrix to compute an update, because it makes this matrix orthogonal.
But ZeRO-1 concatenates all matrices and gives each data-parallel rank one flat slice, which may
begin or end within a matrix. Each rank keeps the momentum of its slice. Before an update, the ranks
gather the slices, and each rank computes the update of every matrix that its slice touches.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.training.without_compiler import without_compiler
from megatron.parallel.groups import Groups
from megatron.parallel.sharding import fused_rows

CPU_DTYPE = torch.float32
"""The dtype in which matrices on a CPU are orthogonalized; on a GPU it is bf16."""

_ITERATION = (3.4445, -4.7750, 2.0315)  # coefficients of the author's polynomial of degree 5
_ITERATIONS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """Return roughly U V^T for a matrix with the singular value decomposition U S V^T.

    The singular values of the result lie between 0.5 and 1.5. The result has the dtype of the
    matrix. Five Newton-Schulz iterations compute the result:

        X <- a X + b (X X^T) X + c (X X^T)^2 X

    The first iteration starts from X = matrix / (norm of the matrix). The constants a, b and c are
    those of Jordan et al. (kellerjordan.github.io/posts/muon).
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = _ITERATION
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@without_compiler
class MuonWithAdamW(torch.optim.Optimizer):
    """An optimizer that uses Muon for parameter groups with `muon` true, and AdamW for the others.

    Args:
        groups: The parameter groups. Each has an entry `muon`, true or false.
        lr: The learning rate of Muon and of AdamW.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        momentum: Muon's momentum.
        split_fused: Whether the parts of a fused matrix, such as queries, keys and values, are made
            orthogonal one by one.
        ranks: The process groups of the job.
    """

    # `groups` is the result of `parameter_groups`. Under ZeRO-1, each rank of `ranks.replicas`
    # updates a slice of the matrices.

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        split_fused: bool,
        ranks: Groups,
    ):
        adamw = without_compiler(torch.optim.AdamW)
        self.adamw = adamw([g for g in groups if not g["muon"]], lr=lr, fused=True)
        self.shapes = {
            g["name"]: [(p.shape, fused_rows(p) if split_fused else (len(p),)) for p in g["params"]]
            for g in groups
            if g["muon"]
        }
        self.ranks = ranks
        own = {"betas": betas, "eps": eps, "fused": True}
        groups = [g | ({"momentum": momentum} if g["muon"] else own) for g in groups]
        super().__init__(groups, {"lr": lr, "muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient."""
        assert closure is None
        # DeepSpeed replaces parameters, and loading a checkpoint replaces groups and state.
        self.adamw.param_groups = [
            {**self.adamw.defaults, **g} for g in self.param_groups if not g["muon"]
        ]
        self.adamw.state = self.state
        self.adamw.step()
        for group in [g for g in self.param_groups if g["muon"]]:
            for i, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._step_muon(parameter, parameter.grad, group, i)

    def _step_muon(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], index: int
    ) -> None:
        """Update a matrix or, under ZeRO, a flat slice of the group's matrices.

        Args:
            index: The number of the matrix in the group. It is ignored for a slice.
        """
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])
        update = update.to(torch.bfloat16 if update.is_cuda else CPU_DTYPE)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if parameter.ndim == 2:
            shape, rows = self.shapes[group["name"]][index]
            parameter.add_(_change(update, rows), alpha=_scale(shape, group["lr"]))
            return
        whole = self._gather(update)
        start, size = self.ranks.replica_rank * parameter.numel(), parameter.numel()
        offset = 0
        for shape, rows in self.shapes[group["name"]]:
            first, last = max(offset, start), min(offset + shape.numel(), start + size)
            if first < last:
                change = _change(whole[offset : offset + shape.numel()].view(shape), rows)
                change = change.flatten()[first - offset : last - offset]
                parameter[first - start : last - start].add_(
                    change, alpha=_scale(shape, group["lr"])
                )
            offset += shape.numel()

    def _gather(self, piece: Tensor) -> Tensor:
        if self.ranks.replica_size == 1:
            return piece
        whole = piece.new_empty(piece.numel() * self.ranks.replica_size)
        dist.all_gather_into_tensor(whole, piece, group=self.ranks.replicas)
        return whole


def _change(update: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Make each matrix in `update` orthogonal, in place; return `update`.

    Args:
        update: Matrices stacked along the first dimension.
        rows: The number of rows of each matrix.
    """
    # `update` may repeat the stack. Each orthogonal matrix is multiplied by sqrt(longer side of the
    # matrix / longer side of `update`).
    for part in update.unflatten(0, (-1, sum(rows))).split(rows, dim=1):
        matrix = part.flatten(0, 1)
        # so that the caller can multiply the whole `update` by `_scale`
        longer = math.sqrt(max(matrix.shape) / max(update.shape))
        part.copy_(orthogonal(matrix).mul_(longer).view_as(part))
    return update


def _scale(shape: torch.Size, lr: float) -> float:
    """Return -0.2 lr sqrt(max(shape)), the scale of an update by Muon."""
    # With this factor, the update has the size of an AdamW update.
    return -0.2 * lr * math.sqrt(max(shape))
