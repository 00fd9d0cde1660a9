"""Define the norm of queries and the norm of keys for models in which these norms share no weights.

    shared   q_h = norm(q_h) * w                     one w [E] for all heads, as in Qwen3
    joined   (q_1 ... q_H) = norm(q_1 ... q_H) * w   w [H E], one vector of all heads, as in OLMo 2

Keys have a norm of the same kind, with another w. Under tensor parallelism, the gradient of a
shared w is summed over the ranks, because the ranks have different heads. A joined norm sums the
squares over the ranks.

Legend: H heads, E head size.
"""

from typing import Any

from torch import Tensor

from megatron.model.block_norm import kind_of
from megatron.model.norm import Norm
from megatron.model.shape import BlockShape
from megatron.parallel.collectives import copy_to, reduce_from
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.sharding import Sharding, mark_sharding


class OwnNorm(Norm):
    """A norm of queries or of keys, with weights of its own.

    Args:
        shape: The description of the transformer block.
        heads: The number of this rank's query heads or key heads.
        tp: The tensor-parallel group.
    """

    def __init__(self, shape: BlockShape, heads: int, tp: TensorGroup = ALONE):
        self.joined, self.tp = shape.qk_norm_kind == "joined", tp
        size = shape.head_size * (heads if self.joined else 1)
        # The input is [..., head size], or [..., this rank's heads * head size] for the kind
        # `joined`.
        super().__init__(kind_of(shape), size, shape.norm_eps, 1, shape.numerics)
        if self.joined:
            for weight in self.parameters():
                mark_sharding(weight, Sharding(0), tp)

    def forward(self, x: Tensor) -> Tensor:
        weights: Any = self._parameters.values()
        if self.tp.size == 1:
            return self.normed(x, *weights)
        if not self.joined:
            return self.normed(x, *(copy_to(weight, self.tp) for weight in weights))
        wide, [weight] = x.to(self.numerics.working_dtype(x.dtype)), weights
        squares = copy_to(reduce_from(wide.square().sum(-1, keepdim=True), self.tp), self.tp)
        mean = squares / (self.dim * self.tp.size)
        return (wide * (mean + self.eps).rsqrt()).to(x.dtype) * weight
