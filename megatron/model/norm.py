"""Compute norms in GPT-NeoX's conventions (parameter names included).

    layernorm      (x - mean) / sqrt(var + eps) * weight + bias
    rmsnorm        x / (|x|_2 / sqrt(D) + eps) * scale     eps OUTSIDE the root, as in GPT-NeoX
    fused_rmsnorm  x / sqrt(|x|_2^2 / D + eps) * scale     eps INSIDE the root
    scalenorm      x / max(|x|_2, eps) * g                 Nguyen & Salazar 2019

Statistics are computed in the dtype that `numerics` prescribes, by default at least fp32. Exports
contain this file (see `megatron.hub.bundle`).

Legend: D size of the last dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.numerics import WIDE, Numerics


class Norm(nn.Module):
    """A norm of vectors [..., D], or of several heads [..., heads, D] with their own weights.

    Args:
        kind: One of `layernorm`, `rmsnorm`, `fused_rmsnorm` and `scalenorm`.
        dim: The size D.
        heads: The number of heads. Each head has its own weights, except in `scalenorm`.
    """

    def __init__(self, kind: str, dim: int, eps: float, heads: int = 1, numerics: Numerics = WIDE):
        super().__init__()
        self.kind, self.dim, self.eps = kind, dim, eps
        self.heads, self.numerics = heads, numerics
        if kind == "scalenorm":
            self.g = nn.Parameter(torch.ones(1))
        elif kind == "layernorm":
            self.weight = nn.Parameter(torch.ones(heads * dim))
            self.bias = nn.Parameter(torch.zeros(heads * dim))
        else:
            self.scale = nn.Parameter(torch.ones(heads * dim))

    def weights(self) -> tuple[Tensor, ...]:
        """Return the norm's weights: (weight, bias), (scale,) or (g,)."""
        if self.kind == "layernorm":
            return self.weight, self.bias
        return (self.g if self.kind == "scalenorm" else self.scale,)

    def forward(self, x: Tensor) -> Tensor:
        weights, size = self.weights(), (self.dim,)
        if self.kind in ("layernorm", "fused_rmsnorm"):
            norm = F.layer_norm if self.kind == "layernorm" else F.rms_norm
            if self.heads == 1:
                return norm(x, size, *weights, eps=self.eps)
            x = norm(x, size, eps=self.eps)
        else:
            wide = x.to(self.numerics.working_dtype(x.dtype))
            length = wide.norm(dim=-1, keepdim=True)
            if self.kind == "scalenorm":
                return (wide / length.clamp(min=self.eps)).to(x.dtype) * weights[0]
            x = (wide / (length * self.dim**-0.5 + self.eps)).to(x.dtype)
        x = x * weights[0].view(-1, self.dim)
        return x + weights[1].view(-1, self.dim) if self.kind == "layernorm" else x
