"""What a positional embedding is: one class, of one of four kinds, in one file.

Attention logits of query position i and key position j <= i in head h, with distance d = i - j:

    s_ij = scale (q_i . k_j) w_h(d) + b_h(d)

`distance` kernels define b (`bias`) and/or w (`weight`) from theta; `rotary` rotates queries and
keys; `input` adds a vector to the token embedding; `none` does nothing. The bias is added
AFTER the 1/sqrt(head size) scaling, as the released KERPLE code and checkpoints do (Eq. 1 of the
paper, arXiv 2205.09921, writes it inside).

Legend: H heads, N columns of theta, `d` a tensor of any shape holding distances >= 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron.numerics import WIDE, Numerics

Kind = Literal["distance", "rotary", "input", "none"]


class PositionalError(ValueError):
    """An unknown embedding or option; the message lists the known ones."""


@dataclass(frozen=True)
class ThetaParameter:
    """One column of theta, a number per head.

    Attributes:
        name: as in published checkpoints (`bias_p`, `wei_a`, ...).
        low, high: closed bounds, enforced by projection after each optimizer step; +-inf for none.
        scale: initial values are `scale * U(0, 1)`, projected into the bounds.
    """

    name: str
    low: float = -torch.inf
    high: float = torch.inf
    scale: float = 1.0


class PositionalEmbedding:
    """Base of all embeddings; a subclass overrides only the methods that its kind uses.

    `bias` and `weight` are pure torch formulas and are the specification: every attention backend
    is tested against them. They never clamp. The optimizer keeps theta within `bounds()`, so the
    gradient at a bound is that of the formula.

    Attributes:
        numerics: where kernels, distances, angles and constants (slopes, frequencies) are rounded.
            Embeddings are cache keys, so it must not change after construction.
    """

    kind: ClassVar[Kind] = "none"
    learnable: ClassVar[bool] = False
    """Whether training changes the theta of a `distance` kernel, or the table of an `input` one."""
    parameters: tuple[ThetaParameter, ...] = ()
    numerics: Numerics = WIDE

    def __init__(self, numerics: Numerics = WIDE):
        self.numerics = numerics

    @property
    def name(self) -> str:
        """The file's name, which is the value of the config key `pos_emb`."""
        return type(self).__module__.rpartition(".")[2]

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        """Initial theta [num_heads, N] fp32 of all heads; tensor parallelism slices the rows."""
        columns = [p.scale * torch.rand(num_heads, generator=generator) for p in self.parameters]
        theta_HN = torch.stack(columns, dim=1) if columns else torch.empty(num_heads, 0)
        low_N, high_N = self.bounds()
        return theta_HN.clamp(low_N, high_N)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """(low [N], high [N]) fp32."""
        low_N = torch.tensor([p.low for p in self.parameters], dtype=torch.float32)
        high_N = torch.tensor([p.high for p in self.parameters], dtype=torch.float32)
        return low_N, high_N

    def within_bounds(self, theta_HN: Tensor) -> Tensor:
        """Theta with each column clamped, to bounds that are exact in theta's dtype."""
        pairs = zip(theta_HN.unbind(1), self.parameters, strict=True)
        return torch.stack([column.clamp(p.low, p.high) for column, p in pairs], dim=1)

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor | None:
        """b_h(d) as [H, *d.shape] in theta's dtype, at least fp32; None if b = 0 everywhere."""
        return None

    def weight(self, theta_HN: Tensor, d: Tensor) -> Tensor | None:
        """w_h(d) as [H, *d.shape] in theta's dtype, at least fp32; None if w = 1 everywhere."""
        return None

    def rotate(
        self,
        q_BHTE: Tensor,
        k_BHTE: Tensor,
        *,
        offset: int = 0,
        rotary_ndims: int | None = None,
        base: float = 10000.0,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, each rotated by its position if the kind is `rotary`.

        Args:
            offset: position of the first query and of the first key.
            rotary_ndims: how many leading dimensions of a head rotate (even); None for all.
            base: the longest wavelength is about 2 pi base.
        """
        return (
            self.turn(q_BHTE, offset, rotary_ndims, base),
            self.turn(k_BHTE, offset, rotary_ndims, base),
        )

    def turn(self, x_BHTE: Tensor, offset: int, rotary_ndims: int | None, base: float) -> Tensor:
        """Queries or keys, rotated; see `rotate`. Unchanged unless the kind is `rotary`."""
        return x_BHTE

    def table(self, positions: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Vectors [*positions.shape, dim] of an `input` embedding without a trained table."""
        raise NotImplementedError(f"{self.name} has no table of position vectors")

    def columns(self, theta_HN: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        """(d, column 0, column 1, ...) of one dtype, at least fp32; columns broadcast with d."""
        theta_HN = theta_HN.to(self.numerics.working_dtype(theta_HN.dtype))
        shape = (-1,) + (1,) * d.dim()
        return d.to(theta_HN.dtype), *(column.view(shape) for column in theta_HN.unbind(1))
