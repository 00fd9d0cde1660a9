"""Define the log-n temperature, t_h(i) = s_h log(i + 1) with a learned factor s_h per head.

Nakanishi 2025 (arXiv 2501.19399, scalable softmax). A query at position i sees i + 1 keys. The
temperature multiplies the scaled query-key products, so that the softmax does not become flatter as
the number of keys grows. Under `reset_position_ids`, i is the position within the document.

With the option `temper_bias`, the temperature multiplies the sum of product and bias, t (s + b), as
in BAM-SSMax (arXiv 2505.22842). Then i is always the position within the document.
"""

import math

import torch
from torch import Tensor

from megatron.numerics import WIDE, Numerics
from megatron.positional.base import PositionalEmbedding, PositionalError
from megatron.positional.theta_parameter import ThetaParameter


class LogN(PositionalEmbedding):
    """Temperature s log(n), which multiplies the query-key products of a query that sees n keys.

    Each head has a learned s, which is initially 1 / log(length).

    Args:
        length: The number of keys (at least 2) at which the initial temperature is 1.
        temper_bias: Whether the temperature also multiplies biases.
    """

    parameters = (ThetaParameter("temperature"),)

    def __init__(self, length: int = 512, temper_bias: bool = False, *, numerics: Numerics = WIDE):
        super().__init__(numerics)
        if length < 2:
            raise PositionalError(f"log_n needs a length of at least 2, not {length}")
        self.length, self.tempers_bias = length, temper_bias

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.full((num_heads, 1), 1.0 / math.log(self.length))

    def temperature(self, theta_HN: Tensor, position: Tensor) -> Tensor:
        i, s = self.columns(theta_HN, position)
        return s * torch.log1p(i)
