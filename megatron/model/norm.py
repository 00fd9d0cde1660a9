"""Normalisation layers in GPT-NeoX's conventions (parameter names included).

    layernorm  (x - mean) / sqrt(var + eps) * weight + bias
    rmsnorm    x / (|x|_2 / sqrt(D) + eps) * scale     eps OUTSIDE the root, as GPT-NeoX has it
    scalenorm  x / max(|x|_2, eps) * g

Statistics are in fp32 at least; `rounds_as_published` leaves them, as the published code does, in
the dtype of x. Legend: D size of the last dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, dim: int, eps: float, rounds_as_published: bool = False):
        super().__init__()
        self.dim, self.eps, self.rounds = dim, eps, rounds_as_published
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if self.rounds else x.to(torch.promote_types(x.dtype, torch.float32))
        rms = wide.norm(dim=-1, keepdim=True) * self.dim**-0.5
        return (wide / (rms + self.eps)).to(x.dtype) * self.scale


class ScaleNorm(nn.Module):
    """One learned length for every vector (Nguyen & Salazar 2019)."""

    def __init__(self, eps: float, rounds_as_published: bool = False):
        super().__init__()
        self.eps, self.rounds = eps, rounds_as_published
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if self.rounds else x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / wide.norm(dim=-1, keepdim=True).clamp(min=self.eps)).to(x.dtype) * self.g


def norm_layer(
    name: str, dim: int, eps: float, rounds_as_published: bool = False
) -> tuple[type[nn.Module], dict[str, Any]]:
    """Class and arguments of the norm called `name` in a config: layernorm, rmsnorm, scalenorm."""
    own = {"eps": eps, "rounds_as_published": rounds_as_published}
    if name == "layernorm":
        return nn.LayerNorm, {"normalized_shape": dim, "eps": eps}
    if name == "rmsnorm":
        return RMSNorm, own | {"dim": dim}
    if name == "scalenorm":
        return ScaleNorm, own
    raise ValueError(f"norm {name!r} is unknown; use layernorm, rmsnorm or scalenorm")


def build_norm(
    name: str, dim: int, eps: float, rounds_as_published: bool = False
) -> nn.Module:
    """The norm called `name`, built."""
    kind, arguments = norm_layer(name, dim, eps, rounds_as_published)
    return kind(**arguments)
