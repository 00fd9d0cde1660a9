"""Define KERPLE's multiplicative distance kernel, w_h(d) = exp(-a d^p) with a > 0 and 0 < p <= 2.

The released code calls this kernel `kerple_power__ap`. The factor w multiplies the scaled product
of query and key. w is positive definite, because w is the exponential of a conditionally positive
definite kernel (arXiv 2205.09921). w_h(0) = 1.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import factor, power


class KerplePowerMul(PositionalEmbedding):
    """Multiplicative KERPLE kernel: exp(-a d^p) multiplies query-key products at distance d.

    Initially p ~ 2 U(0, 1) and a ~ U(0, 1). The bounds are 0.01 <= p <= 2 and a >= 0.01.
    """

    parameters = (power("wei_p"), factor("wei_a"))

    def weight(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, p, a = self.columns(theta_HN, d)
        return torch.exp(-a * d**p)
