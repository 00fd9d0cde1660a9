"""Define a Gaussian-like bias with a learned power, b_h(d) = a (exp(-r d^p) - 1), 0 < p <= 2.

The KERPLE paper (arXiv 2205.09921) tests this bias as "3-para-bias", a exp(-r d^p), in Appendix A.3
and Table 6. The constant -a, which softmax ignores, makes b_h(0) = 0. exp(-r d^p) is positive
definite for 0 < p <= 2 only. With p = 2 the formula is that of `gaussian`.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import factor, power


class Gaussian3(PositionalEmbedding):
    """Gaussian-like kernel: the bias a (exp(-r d^p) - 1) at the query-key distance d.

    Initially a, r ~ U(0, 1) and p ~ 2 U(0, 1). The bounds are a, r >= 0.01 and 0.01 <= p <= 2.
    """

    parameters = (factor("gauss_a"), factor("gauss_r"), power("gauss_p"))

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, a, r, p = self.columns(theta_HN, d)
        return a * torch.expm1(-r * d**p)
