"""Define T5's relative position bias, b_h(d) = scale * theta[h, bucket(d)].

Raffel et al., JMLR 2020 (arXiv 1910.10683). This is the causal form. With K buckets and M = K // 2:

    bucket(d) = d                                                          d < M
                min(K - 1, M + floor(log(d / M) / log(max_distance / M) (K - M)))   otherwise

GPT-NeoX multiplies the table by sqrt(head size), because T5 does not divide its scores by sqrt(head
size). The caller must pass this factor as the option `scale`, because an embedding object does not
contain the head size.
"""

import math

import torch
from torch import Tensor

from megatron.numerics import WIDE, Numerics
from megatron.positional.base import PositionalEmbedding, PositionalError
from megatron.positional.theta_parameter import ThetaParameter


class Rpe(PositionalEmbedding):
    """T5's relative bias: one learned bias for each head and each bucket of distances.

    Args:
        num_buckets: The number of buckets, at least 2.
        max_distance: All distances of at least `max_distance` are in the last bucket.
            `max_distance` must be above num_buckets // 2.
        scale: A number that multiplies the learned biases. GPT-NeoX uses sqrt(head size).
    """

    def __init__(
        self,
        num_buckets: int = 32,
        max_distance: int = 128,
        scale: float = 1.0,
        *,
        numerics: Numerics = WIDE,
    ):
        super().__init__(numerics)
        if num_buckets < 2 or max_distance <= num_buckets // 2:
            raise PositionalError(
                f"rpe needs num_buckets >= 2 and max_distance > num_buckets // 2, "
                f"not {num_buckets} and {max_distance}"
            )
        self.num_buckets, self.max_distance, self.scale = num_buckets, max_distance, scale
        self.parameters = tuple(
            ThetaParameter(f"bucket_{i}", gentle=0.0) for i in range(num_buckets)
        )

    def scaled(self, distance_scale: float) -> PositionalEmbedding:
        raise PositionalError("rpe's buckets hold whole distances, which cannot be scaled")

    def initial_theta(self, num_heads: int, generator: torch.Generator | None = None) -> Tensor:
        # Xavier-normal initialisation of the published [buckets, heads] table.
        std = math.sqrt(2.0 / (self.num_buckets + num_heads))
        return std * torch.randn(self.num_buckets, num_heads, generator=generator).T.contiguous()

    def bucket(self, d: Tensor) -> Tensor:
        """Return the index of each distance's bucket, int64 in the shape of `d`."""
        exact = self.num_buckets // 2
        # in fp32, as in GPT-NeoX
        ratio = torch.log(d.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        far = exact + (ratio * (self.num_buckets - exact)).long()
        return torch.where(d < exact, d.long(), far.clamp(max=self.num_buckets - 1))

    def bias(self, theta_HN: Tensor, d: Tensor) -> Tensor:
        theta_HN = theta_HN.to(self.numerics.working_dtype(theta_HN.dtype))
        # An embedding lookup sums its gradient in a fixed order on every device. Indexing does not.
        values = torch.nn.functional.embedding(self.bucket(d), theta_HN.T)
        return self.scale * values.movedim(-1, 0)
