"""Define KERPLE's distance kernel that has both an additive bias and a multiplicative factor.

    b_h(d) = -a d^p        w_h(d) = exp(-a' d^p')        a, a' > 0, 0 < p, p' <= 2

The released code calls this kernel `kerple_power_ap_ap`. The bias has the form of `kerple_power`,
and the factor has the form of `kerple_power_mul`. The two have separate parameters.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import factor, power


class KerplePowerAddMul(PositionalEmbedding):
    """KERPLE kernel with a bias -a d^p, and a factor exp(-a' d^p') of the query-key products.

    d is the query-key distance. Initially p, p' ~ 2 U(0, 1) and a, a' ~ U(0, 1).
    The bounds are 0.01 <= p, p' <= 2 and a, a' >= 0.01.
    """

    parameters = (power("bias_p"), factor("bias_a"), power("wei_p"), factor("wei_a"))

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a, _, _ = self.columns(theta_HN, d)
        return -a * d**p

    def weight(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, _, _, p, a = self.columns(theta_HN, d)
        return torch.exp(-a * d**p)
