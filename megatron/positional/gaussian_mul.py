"""Define a Gaussian factor, w_h(d) = exp(-r d^2) with r > 0.

The KERPLE paper (arXiv 2205.09921) tests this factor as "1-para-wht" in Appendix A.3 and Table 6.
(Its "2-para-wht", with a learned power, is `kerple_power_mul`.) The factor w multiplies the scaled
product of query and key. w is positive definite, and w_h(0) = 1.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import factor


class GaussianMul(PositionalEmbedding):
    """Multiplicative Gaussian kernel: exp(-r d^2) multiplies query-key products at distance d.

    Initially r ~ U(0, 1). The bound is r >= 0.01.
    """

    # With r = 0.01, the factor is 0.1 at distance 15.
    parameters = (factor("gauss_r"),)

    def weight(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, r = self.columns(theta_HN, d)
        return torch.exp(-r * d**2)
