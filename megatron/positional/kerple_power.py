"""KERPLE, power variant (published as `kerple_power_ap_`): b_h(d) = -a d^p, a > 0, 0 < p <= 2.

arXiv 2205.09921. CPD for these p; p = 1 is ALiBi with a learned slope. b_h(0) = 0. The derivative
by p at d = 0 is 0 as well: torch's pow returns 0 where d^p log d would be 0 log 0.
"""

from __future__ import annotations

from torch import Tensor

from megatron.positional.base import PositionalEmbedding, ThetaParameter


class KerplePower(PositionalEmbedding):
    """p ~ 2 U(0, 1) kept in [0.01, 2], a ~ U(0, 1) kept >= 0.01."""

    kind = "distance"
    learnable = True
    parameters = (
        ThetaParameter("bias_p", low=0.01, high=2.0, scale=2.0),
        ThetaParameter("bias_a", low=0.01, scale=1.0),
    )

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a = self.columns(theta_HN, d)
        return -a * d**p
