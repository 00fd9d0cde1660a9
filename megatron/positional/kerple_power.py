"""Define KERPLE's power distance kernel, b_h(d) = -a d^p with a > 0 and 0 < p <= 2.

The released code calls this kernel `kerple_power_ap_` (arXiv 2205.09921). The bias is conditionally
positive definite for 0 < p <= 2. With p = 1 the bias is that of ALiBi, but its slope is learned. At
d = 0 the bias is 0, and the derivative with respect to p contains d^p log d = 0 log 0. Torch
evaluates this product as 0.
"""

from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import factor, power


class KerplePower(PositionalEmbedding):
    """KERPLE's power kernel: the bias -a d^p at the query-key distance d.

    Initially p ~ 2 U(0, 1) and a ~ U(0, 1). The bounds are 0.01 <= p <= 2 and a >= 0.01.
    """

    parameters = (power("bias_p", gentle=0.5), factor("bias_a", gentle=0.1))

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a = self.columns(theta_HN, d)
        return -a * d**p
