"""Define FIRE, a bias that a small network computes from the distance and the query's position.

Li et al. 2023 (arXiv 2310.04418). For a query at position i, and a key at distance d,

    b_h(d, i) = sum_k v_hk relu(w_k u + b_k)      u = log(1 + c d) / log(1 + c max(L, i))

All heads share the parameters w_k, b_k, c and L. Each head h has its own v_hk. The output layer v
has no constant term, because a constant added to all logits does not change the softmax. (With a
sink a constant would matter, but the sink's learned logit has the same effect.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.numerics import WIDE, Numerics
from megatron.positional.base import PositionalEmbedding, PositionalError
from megatron.positional.hidden_layer import hidden_layer
from megatron.positional.theta_parameter import ThetaParameter


class Fire(PositionalEmbedding):
    """FIRE: the bias sum_k v_k relu(w_k u + b_k), the output of a small network for each head.

    For a query at position i and distance d, u is log(1 + c d) / log(1 + c max(L, i)). c, L and all
    w, b and v are learned.

    Args:
        length: The initial value of L.
        width: The number of terms of the sum.
    """

    reads_position = True

    def __init__(self, length: int = 512, width: int = 32, *, numerics: Numerics = WIDE):
        super().__init__(numerics)
        if min(length, width) < 1:
            raise PositionalError(f"fire needs length, width >= 1, not {length} and {width}")
        self.length, self.width = length, width
        names = ("L_factor", *(f"{x}{k}" for x in ("w", "b") for k in range(width)))
        lows = (0.001, *[-torch.inf] * 2 * width)
        shared = [ThetaParameter("c", low=0.001, shared=True)]
        shared += [ThetaParameter(*each, shared=True) for each in zip(names, lows, strict=True)]
        # The model stores L / length as `L_factor`. Each head has its own v_k. All heads share
        # the others.
        self.parameters = (*shared, *(ThetaParameter(f"v{k}", gentle=0.0) for k in range(width)))

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        shared = torch.cat(
            (torch.tensor([0.1, 1.0]), torch.rand(2 * self.width, generator=generator))
        )
        shared[2:] = 2.0 * shared[2:] - 1.0
        v_HK = 2.0 * torch.rand(num_heads, self.width, generator=generator) - 1.0
        return torch.cat((shared.expand(num_heads, -1), v_HK / self.width**0.5), dim=1)

    def bias(self, theta_HN: Tensor, d: Tensor, i: Tensor) -> Tensor:
        theta_HN = theta_HN.to(self.numerics.working_dtype(theta_HN.dtype))
        d, c, factor = self.columns(theta_HN[:, :2], d)
        i, *_ = self.columns(theta_HN[:, :2], i)
        log1p, longest = self.numerics.log1p, i + F.relu(self.length * factor - i)
        w_HK, b_HK, v_HK = theta_HN[:, 2:].split(self.width, dim=1)
        return hidden_layer(log1p(c * d) / log1p(c * longest), w_HK, b_HK, v_HK)
