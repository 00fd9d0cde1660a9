"""Define Sandwich, the fixed bias b_h(d) = (S(d) - S(0)) H / (8 (h + 1)) of H heads.

Chi, Fan, Rudnicky, Ramadge, ACL 2023 (arXiv 2212.10356). S(d) is the inner product of two
sinusoidal position vectors of D dimensions at distance d:

    S(d) = sum of cos(d 10000^(-2i/D)) over i = 0 ... D/2 - 1

The constant -S(0) = -D/2, which softmax ignores, makes b_h(0) = 0. D is an option, not the
model's hidden size.
"""

import torch
from torch import Tensor

from megatron.numerics import WIDE, Numerics
from megatron.positional.base import PositionalEmbedding, PositionalError
from megatron.positional.theta_parameter import ThetaParameter


class Sandwich(PositionalEmbedding):
    """Sandwich: the fixed bias (S(d) - S(0)) H / (8 (h + 1)) at distance d, in head h of H heads.

    S(d) is the inner product of two sinusoidal position vectors at distance d.

    Args:
        dimensions: The size of a position vector. It must be even (128 in the paper).
    """

    parameters = (ThetaParameter("scale", trained=False),)

    def __init__(self, dimensions: int = 128, *, numerics: Numerics = WIDE):
        super().__init__(numerics)
        if dimensions < 2 or dimensions % 2:
            raise PositionalError(f"sandwich needs even dimensions >= 2, not {dimensions}")
        # The attention backend `eager` needs memory for `dimensions` / 2 numbers per score.
        self.dimensions = dimensions

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.tensor([[num_heads / (8.0 * (h + 1))] for h in range(num_heads)])

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, scale = self.columns(theta_HN, d)
        # float64: fp32 would lose the angle at long distances. cos x - 1 = -2 sin(x / 2)^2.
        twice_i = torch.arange(0, self.dimensions, 2, dtype=torch.float64, device=d.device)
        angle = d.double()[..., None] * (0.5 * 10000.0 ** (twice_i / -self.dimensions))
        return scale * (-2.0 * angle.sin().square()).sum(-1).to(scale.dtype)
