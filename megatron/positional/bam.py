"""Define BAM's generalized Gaussian bias, b_h(d) = -exp(alpha) (|d + mu| + eps)^beta.

Bianchessi, Aguirre, Barros, Kupssinsku 2025 (arXiv 2505.22842). The formula is that of the authors'
code: eps is 1e-5, and the location mu is exp(theta_mu) - exp(-theta_mu). The bias turns at the
distance d = -mu. (With mu < 0 and beta > 0, this is the distance of the key that the head prefers.)
With mu = 0, beta < 0 suppresses near keys, beta = 0 has the same effect as no bias, and beta = 1 is
ALiBi with a learned slope. For the form of BAM-SSMax, combine this embedding with `log_n`, and set
the option `temper_bias` of `log_n`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import ThetaParameter


class Bam(PositionalEmbedding):
    """BAM: the bias -exp(alpha) (|d + mu| + 1e-5)^beta at the query-key distance d.

    mu is exp(theta_mu) - exp(-theta_mu). Each head has the parameters alpha, beta and theta_mu, all
    initially 0. The paper does not train theta_mu.
    """

    parameters = tuple(ThetaParameter(f"theta_{name}") for name in ("alpha", "beta", "mu"))

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(num_heads, 3)

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, alpha, beta, mu = self.columns(theta_HN, d)
        past = d + (mu.exp() - (-mu).exp())
        return -alpha.exp() * (F.relu(past) + F.relu(-past) + 1e-5) ** beta
