"""KERPLE, the paper's three-parameter logarithm: b_h(d) = -p log(1 + a d^r), 0 < r <= 2.

arXiv 2205.09921; r = 1 is `kerple_log`. CPD because d^r is conditionally negative definite for
these r, and so is the logarithm of one plus such a function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding, ThetaParameter


class KerpleLog3(PositionalEmbedding):
    """p ~ 2 U(0, 1), a ~ U(0, 1), both kept >= 0.01; r ~ 2 U(0, 1) kept in [0.01, 2]."""

    kind = "distance"
    learnable = True
    parameters = (
        ThetaParameter("bias_p", low=0.01, scale=2.0),
        ThetaParameter("bias_a", low=0.01, scale=1.0),
        ThetaParameter("bias_r", low=0.01, high=2.0, scale=2.0),
    )

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a, r = self.columns(theta_HN, d)
        # pow's derivative by the exponent is 0 at d = 0, not 0 log 0.
        return -p * torch.log1p(a * d**r)
