"""Define the attention sink, a null key with a learned logit per head and the value 0.

A head that finds nothing to attend to can give its weight to the null key. Without a null
key, as Xiao et al. 2023 (arXiv 2309.17453) observed, heads give that weight to the first tokens.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import ThetaParameter


class Sink(PositionalEmbedding):
    """Attention sink: an additional key with the value 0 in each softmax.

    Each head has a learned logit for this key, which is initially 0.
    """

    parameters = (ThetaParameter("sink"),)

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(num_heads, 1)

    def sink(self, theta_HN: Tensor) -> Tensor:
        return theta_HN[:, 0]
