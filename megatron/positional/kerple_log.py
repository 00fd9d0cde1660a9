"""Define KERPLE's logarithmic distance kernel, b_h(d) = -p log(1 + a d) with p, a > 0.

Chi, Fan, Ramadge, Rudnicky, NeurIPS 2022 (arXiv 2205.09921). The function p log(1 + a d) is
conditionally negative definite, so the bias b is conditionally positive definite (CPD). Adding a
large constant would make b positive definite, and the softmax is invariant to such a constant.
"""

from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import ThetaParameter, factor


class KerpleLog(PositionalEmbedding):
    """Logarithmic KERPLE kernel: the bias -p log(1 + a d) at the query-key distance d.

    Initially p ~ 2 U(0, 1) and a ~ U(0, 1). The bounds are p, a >= 0.01.
    """

    parameters = (
        ThetaParameter("bias_p", low=0.01, scale=2.0, gentle=0.5),
        factor("bias_a", gentle=0.05),
    )

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a = self.columns(theta_HN, d)
        return -p * self.numerics.log1p(a * d)
