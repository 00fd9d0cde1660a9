"""Define KERPLE's three-parameter distance kernel, b_h(d) = -p log(1 + a d^r) with 0 < r <= 2.

arXiv 2205.09921. With r = 1 the formula is that of `kerple_log`. For 0 < r <= 2, the function d^r
is conditionally negative definite (CND). If f >= 0 is CND, so is log(1 + f). Therefore the bias is
conditionally positive definite.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import ThetaParameter, factor, power


class KerpleLog3(PositionalEmbedding):
    """Three-parameter KERPLE kernel: the bias -p log(1 + a d^r) at the query-key distance d.

    Initially p ~ 2 U(0, 1), a ~ U(0, 1) and r ~ 2 U(0, 1).
    The bounds are p, a >= 0.01 and 0.01 <= r <= 2.
    """

    parameters = (
        ThetaParameter("bias_p", low=0.01, scale=2.0, gentle=0.5),
        factor("bias_a", gentle=0.05),
        power("bias_r", gentle=1.0),
    )

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a, r = self.columns(theta_HN, d)
        # torch's derivative of pow with respect to the exponent is 0 at d = 0, not 0 log 0 = NaN.
        return -p * torch.log1p(a * d**r)
