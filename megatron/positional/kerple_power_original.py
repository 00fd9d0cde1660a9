"""KERPLE's stand-in for ALiBi: b_h(d) = -max(m_h, 0.01) d with ALiBi's fixed slopes m_h.

The released code clamps these slopes at 0.01, so this is not exactly ALiBi: for every power of two
H, ALiBi's last slope is 1/256. Kept as published; use `alibi` for ALiBi itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.positional.alibi import slopes
from megatron.positional.base import PositionalEmbedding, ThetaParameter


class KerplePowerOriginal(PositionalEmbedding):
    """Theta holds the slopes, projected into the bounds once; they are not trained."""

    kind = "distance"
    parameters = (ThetaParameter("bias_a", low=0.01),)

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.tensor(slopes(num_heads), dtype=torch.float32)[:, None].clamp(*self.bounds())

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        d, a = self.columns(theta_HN, d)
        return -a * d
