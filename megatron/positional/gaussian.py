"""Define a Gaussian bias, b_h(d) = a (exp(-r d^2) - 1) with a, r > 0.

The KERPLE paper (arXiv 2205.09921) tests this bias as "2-para-bias", a exp(-r d^2), in Appendix A.3
and Table 6. The constant -a, which softmax ignores, makes b_h(0) = 0. Without this constant, the
kernel is positive definite. The paper finds that bounded biases such as this extrapolate badly.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import factor


class Gaussian(PositionalEmbedding):
    """Gaussian kernel: the bias a (exp(-r d^2) - 1) at the query-key distance d.

    Initially a, r ~ U(0, 1). The bounds are a, r >= 0.01.
    """

    # The KERPLE paper has no initial values and bounds for this kernel. Those of the coefficients
    # in its other kernels are used.
    parameters = (factor("gauss_a"), factor("gauss_r"))

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, a, r = self.columns(theta_HN, d)
        return a * torch.expm1(-r * d**2)
