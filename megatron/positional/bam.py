"""Define BAM's generalized Gaussian bias, b_h(d) = -exp(alpha) (|d + mu| + eps)^beta.

Bianchessi, Aguirre, Barros, Kupssinsku 2025 (arXiv 2505.22842). The formula is that of the authors'
code: eps is 1e-5, and the location mu = exp(theta_mu) - exp(-theta_mu) is the distance, in the
direction of later keys, at which the bias turns. (With mu < 0 the preferred key lies -mu before the
query.) beta < 0 suppresses near keys, beta = 0 is no bias at all, and beta = 1 is ALiBi with a
learned slope. For BAM-SSMax, combine it with `log_n` and its option `temper_bias`.
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
