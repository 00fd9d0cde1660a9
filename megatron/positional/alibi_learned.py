"""Define ALiBi with learned slopes, b_h(d) = -m_h d with m_h >= 0.

Press, Smith, Lewis, ICLR 2022 (arXiv 2108.12409) fix the slopes. Here each slope starts at ALiBi's
and is trained. The bias is conditionally positive definite for m_h >= 0. With m_h = 0 the head sees
no positions. The slope's gradient is not 0 even then, so training can raise the slope again. Adam
changes every slope by about the learning rate in each step. So small slopes (from 2^-8) change much
faster, relative to their size, than large ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.positional.alibi import slopes
from megatron.positional.base import PositionalEmbedding, ThetaParameter


class AlibiLearned(PositionalEmbedding):
    """Distance kernel -m d whose initial slopes m are those of `alibi`. The bound is m >= 0."""

    kind = "distance"
    learnable = True
    parameters = (ThetaParameter("slope", low=0.0),)

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.tensor(slopes(num_heads), dtype=torch.float32)[:, None]

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, slope = self.columns(theta_HN, d)
        return -slope * d
