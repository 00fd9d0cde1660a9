"""Compute norms in GPT-NeoX's conventions (parameter names included).

    layernorm      (x - mean) / sqrt(var + eps) * weight + bias
    rmsnorm        x / (|x|_2 / sqrt(D) + eps) * scale     eps OUTSIDE the root, as in GPT-NeoX
    fused_rmsnorm  x / sqrt(|x|_2^2 / D + eps) * scale     eps INSIDE the root
    scalenorm      x / max(|x|_2, eps) * g                 Nguyen & Salazar 2019

Statistics are computed in the dtype that `numerics` prescribes, by default at least fp32. Exports
contain this file (see `megatron.hub.bundle`).

Legend: D size of the last dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.numerics import WIDE, Numerics


class Norm(nn.Module):
    """A layer that normalises vectors [..., dim] or [..., heads, dim].

    Args:
        kind: One of `layernorm`, `rmsnorm`, `fused_rmsnorm` and `scalenorm`.
        dim: The size of a vector.
        heads: The number of heads with weights of their own. 1 means that all heads share the
            weights. `scalenorm` ignores this argument.
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
        self.names = tuple(self._parameters)

    def forward(self, x: Tensor) -> Tensor:
        # Faster than attributes, but replicas of DataParallel and views of FSDP are no parameters.
        weights: Any = self._parameters.values() or [getattr(self, name) for name in self.names]
        return self.normed(x, *weights)

    def normed(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's output for `x`, but with the given `weight` and `bias`."""
        kind, dim, eps = self.kind, self.dim, self.eps
        if bias is not None:
            if self.heads == 1:
                return F.layer_norm(x, (dim,), weight, bias, eps)
            unit = F.layer_norm(x, (dim,), eps=eps)
            return unit * weight.view(-1, dim) + bias.view(-1, dim)
        if kind == "fused_rmsnorm":
            if self.heads == 1:
                return F.rms_norm(x, (dim,), weight, eps)
            return F.rms_norm(x, (dim,), eps=eps) * weight.view(-1, dim)
        wide = x.to(self.numerics.working_dtype(x.dtype))
        length = wide.norm(dim=-1, keepdim=True)
        if kind == "scalenorm":
            return (wide / length.clamp(min=eps)).to(x.dtype) * weight
        return (wide / (length * dim**-0.5 + eps)).to(x.dtype) * weight.view(-1, dim)
