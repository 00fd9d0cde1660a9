"""Normalisation layers in GPT-NeoX's conventions (parameter names included).

layernorm  (x - mean) / sqrt(var + eps) * weight + bias
rmsnorm    x / (rms(x) + eps) * scale          eps OUTSIDE the root, as GPT-NeoX has it
scalenorm  x / max(|x|_2, eps) * g
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; statistics in at least fp32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rms = wide.square().mean(-1, keepdim=True).sqrt()
        return (wide / (rms + self.eps)).to(x.dtype) * self.scale


class ScaleNorm(nn.Module):
    """One learned length for every vector (Nguyen & Salazar 2019)."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / wide.norm(dim=-1, keepdim=True).clamp(min=self.eps)).to(x.dtype) * self.g


def norm_layer(name: str, dim: int, eps: float) -> tuple[type[nn.Module], dict[str, Any]]:
    """Class and arguments of the norm called `name` in a config: layernorm, rmsnorm, scalenorm."""
    if name == "layernorm":
        return nn.LayerNorm, {"normalized_shape": dim, "eps": eps}
    if name == "rmsnorm":
        return RMSNorm, {"dim": dim, "eps": eps}
    if name == "scalenorm":
        return ScaleNorm, {"eps": eps}
    raise ValueError(f"norm {name!r} is unknown; use layernorm, rmsnorm or scalenorm")


def build_norm(name: str, dim: int, eps: float) -> nn.Module:
    """The norm called `name`, built."""
    kind, arguments = norm_layer(name, dim, eps)
    return kind(**arguments)
