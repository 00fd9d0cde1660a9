"""Define the ALiBi embedding, b_h(d) = -m_h d with fixed slopes m_h.

Press, Smith, Lewis, ICLR 2022 (arXiv 2108.12409). If the number of heads H is a power of two, the
slopes are the geometric sequence 2^(-8/H), 2^(-16/H), and so on. Otherwise they are the slopes for
the next lower power of two, followed by every other slope for the next higher power of two.
"""

import torch
from torch import Tensor

from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_parameter import ThetaParameter


def slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slopes of the heads 0 ... num_heads - 1."""
    below = 1 << (num_heads.bit_length() - 1)  # the largest power of two <= num_heads
    geometric = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    between = [2.0 ** (-4.0 * (h + 1) / below) for h in range(0, 2 * below, 2)]
    return geometric + between[: num_heads - below]


class Alibi(PositionalEmbedding):
    """ALiBi: the bias -m d at the query-key distance d, with a fixed slope m for each head."""

    parameters = (ThetaParameter("slope", trained=False),)

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        slope_H = torch.tensor(slopes(num_heads), dtype=torch.float32)
        return slope_H.clamp(min=self.parameters[0].low)[:, None]

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, slope = self.columns(theta_HN, d)
        return -slope * d
