"""KERPLE as a multiplicative kernel (published as `kerple_power__ap`): w_h(d) = exp(-a d^p).

The exponential of a CPD kernel is positive definite, so w multiplies the scaled product of query
and key (arXiv 2205.09921; configurations of the released code). a > 0, 0 < p <= 2; w_h(0) = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding, ThetaParameter


class KerplePowerMul(PositionalEmbedding):
    """p ~ 2 U(0, 1) kept in [0.01, 2], a ~ U(0, 1) kept >= 0.01."""

    kind = "distance"
    learnable = True
    parameters = (
        ThetaParameter("wei_p", low=0.01, high=2.0, scale=2.0),
        ThetaParameter("wei_a", low=0.01, scale=1.0),
    )

    def weight(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a = self.columns(theta_HN, d)
        return torch.exp(-a * d**p)
