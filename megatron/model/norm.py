"""Define normalisation layers in GPT-NeoX's conventions (parameter names included).

    layernorm  (x - mean) / sqrt(var + eps) * weight + bias
    rmsnorm    x / (|x|_2 / sqrt(D) + eps) * scale     eps OUTSIDE the root, as in GPT-NeoX
    scalenorm  x / max(|x|_2, eps) * g

With `fused_norm`, layernorm and rmsnorm call apex's kernels. If apex is not installed, they call
torch's functions instead, which compute the same values. As in GPT-NeoX, the fused rmsnorm has eps
INSIDE the root.

Statistics are computed in the dtype that `numerics` prescribes, by default at least fp32. If the
ranks of the tensor-parallel group `tp` hold different positions, `copy_to` sums the gradients of
the weights over these ranks. A norm of several heads takes [..., heads, D]. It has weights
[heads * D], so that each head has its own.

Legend: D size of the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron import nvidia_apex
from megatron.model.shape import BlockShape
from megatron.numerics import Numerics
from megatron.parallel.collectives import copy_to
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.sharding import Sharding, mark_sharding

_Kernel = Callable[..., torch.Tensor]
_APEX = "apex.normalization.fused_layer_norm"


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, with weight gradients summed over ranks that hold different positions."""

    def __init__(
        self, dim: int, eps: float, tp: TensorGroup, kernel: _Kernel | None = None, heads: int = 1
    ):
        super().__init__(dim, eps=eps)
        self.tp, self.kernel, self.heads = tp, kernel, heads
        if heads > 1:
            self.weight = nn.Parameter(torch.ones(heads * dim))
            self.bias = nn.Parameter(torch.zeros(heads * dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = copy_to(self.weight, self.tp), copy_to(self.bias, self.tp)
        if self.heads > 1:
            unit = F.layer_norm(x, self.normalized_shape, eps=self.eps)
            return unit * weight.view(self.heads, -1) + bias.view(self.heads, -1)
        if self.kernel is not None:
            return self.kernel(x, weight, bias, self.normalized_shape, self.eps)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, dim: int, eps: float, tp: TensorGroup, numerics: Numerics, heads: int = 1):
        super().__init__()
        self.dim, self.eps, self.tp, self.numerics = dim, eps, tp, numerics
        self.scale = nn.Parameter(torch.ones(heads * dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.numerics.working_dtype(x.dtype))
        rms = wide.norm(dim=-1, keepdim=True) * self.dim**-0.5
        unit = (wide / (rms + self.eps)).to(x.dtype)
        return unit * copy_to(self.scale, self.tp).view(-1, self.dim)


class FusedRMSNorm(nn.Module):
    """Root mean square norm with eps inside the root, by apex's kernel or torch's function."""

    def __init__(
        self, dim: int, eps: float, tp: TensorGroup, kernel: _Kernel | None, heads: int = 1
    ):
        super().__init__()
        self.dim, self.eps, self.tp, self.kernel, self.heads = dim, eps, tp, kernel, heads
        self.scale = nn.Parameter(torch.ones(heads * dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = copy_to(self.scale, self.tp)
        if self.heads > 1:
            return F.rms_norm(x, (self.dim,), eps=self.eps) * scale.view(self.heads, -1)
        if self.kernel is not None:
            return self.kernel(x, scale, (self.dim,), self.eps)
        return F.rms_norm(x, (self.dim,), scale, self.eps)


class ScaleNorm(nn.Module):
    """Norm that scales every vector to the same learned length (Nguyen & Salazar 2019)."""

    def __init__(self, eps: float, tp: TensorGroup, numerics: Numerics):
        super().__init__()
        self.eps, self.tp, self.numerics = eps, tp, numerics
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.numerics.working_dtype(x.dtype))
        unit = (wide / wide.norm(dim=-1, keepdim=True).clamp(min=self.eps)).to(x.dtype)
        return unit * copy_to(self.g, self.tp)


def apex_norm(shape: BlockShape) -> tuple[_Kernel | None, str]:
    """Return apex's function for the norm `shape.norm`, and a text for the log.

    Returns:
        (function, text). The function is None if torch's function must be used instead. The text
        says which function is used and why, or is "" if the shape does not ask for a fused norm.
    """
    if not shape.fused_norm:
        return None, ""
    name = {"layernorm": "fused_layer_norm_affine", "rmsnorm": "fused_rms_norm_affine"}[shape.norm]
    found, why = nvidia_apex.find(_APEX, name, "fused_layer_norm_cuda")
    if found is None:
        return None, f"torch's {shape.norm} instead of apex's, because {why}"
    return found, f"apex's {shape.norm}"


def norm_layer(shape: BlockShape, tp: TensorGroup) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class and the constructor arguments of the norm `shape.norm`.

    Raises:
        ValueError: `shape.norm` is not `layernorm`, `rmsnorm` or `scalenorm`.
    """
    tp = tp if tp.splits_sequence else ALONE
    common = {"eps": shape.norm_eps, "tp": tp}
    kernel, _ = apex_norm(shape)
    if shape.norm == "layernorm":
        return LayerNorm, common | {"dim": shape.hidden_size, "kernel": kernel}
    if shape.norm == "rmsnorm" and shape.fused_norm:
        return FusedRMSNorm, common | {"dim": shape.hidden_size, "kernel": kernel}
    if shape.norm == "rmsnorm":
        return RMSNorm, common | {"dim": shape.hidden_size, "numerics": shape.numerics}
    if shape.norm == "scalenorm":
        return ScaleNorm, common | {"numerics": shape.numerics}
    raise ValueError(f"norm {shape.norm!r} is unknown; use layernorm, rmsnorm or scalenorm")


def build_norm(shape: BlockShape, tp: TensorGroup = ALONE) -> nn.Module:
    """Build the norm `shape.norm`; see `norm_layer`."""
    kind, arguments = norm_layer(shape, tp)
    return kind(**arguments)


def build_head_norm(shape: BlockShape, tp: TensorGroup) -> nn.Module:
    """Build the norm of queries and keys [..., this rank's heads, head size], head by head.

    As in gpt-neox, queries and keys share this norm, and each head has its own weights.
    """
    kind, arguments = norm_layer(shape, ALONE)
    if kind is ScaleNorm:
        return ScaleNorm(shape.norm_eps, tp, shape.numerics)  # one factor for all ranks' heads
    heads = {"dim": shape.head_size, "heads": shape.num_heads // tp.size}
    norm = kind(**arguments | heads)
    for param in norm.parameters():
        mark_sharding(param, Sharding(0), tp)
    return norm
