"""Define the rotary embedding, which rotates queries and keys by their positions, as in GPT-NeoX.

Su et al. 2021 (arXiv 2104.09864). Only the first R (`rotary_ndims`) of the E head dimensions
rotate. Dimension m is paired with dimension m + R/2, for m = 0 ... R/2 - 1. At position t, this
pair is rotated by the angle phi = t base^(-2m/R):

    x'_m = x_m cos phi - x_{m+R/2} sin phi        x'_{m+R/2} = x_{m+R/2} cos phi + x_m sin phi

Angles and products are computed in fp32, or in fp64 for fp64 inputs. Frequencies are rounded to
fp32 even for fp64 inputs, as in a GPT-NeoX model that was cast to fp64. The result has the dtype of
the input.

Legend: B batch, H heads, T positions, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding, PositionalError


def frequencies(dim: int, base: float, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return base^(-2m/dim) for all m < dim/2, rounded to fp32 and then cast to `dtype`."""
    if dim % 2:
        raise PositionalError(f"positions are encoded in pairs of dimensions, {dim} is odd")
    exponent = torch.arange(0, dim, 2, device=device).float() / dim
    return (1.0 / base**exponent).to(dtype)


class Rotary(PositionalEmbedding):
    """Rotary embedding. The model calls `rotate` before attention. There is no distance kernel."""

    kind = "rotary"

    def turn(
        self, x_BHTE: Tensor, positions_BT: Tensor, rotary_ndims: int | None, base: float
    ) -> Tensor:
        size = x_BHTE.shape[-1]
        ndims = size if rotary_ndims is None else rotary_ndims
        if ndims > size:
            raise PositionalError(f"rotary_ndims is {ndims}, but a head has {size} dimensions")
        dtype, device = self.numerics.working_dtype(x_BHTE.dtype), x_BHTE.device
        turns = self.numerics.constant(frequencies(ndims, base, dtype, device))
        position_B1T1 = positions_BT[:, None, :, None].to(dtype)
        if self.distance_scale != 1.0:
            position_B1T1 = self.distance_scale * position_B1T1
        angle_B1TR = position_B1T1 * turns
        cos, sin = angle_B1TR.cos(), angle_B1TR.sin()
        rotated, kept = x_BHTE.split([ndims, size - ndims], dim=-1)
        x1, x2 = rotated.to(dtype).chunk(2, dim=-1)
        rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_BHTE.dtype)
        return torch.cat((rotated, kept), dim=-1) if ndims < size else rotated
