"""Implement linear and embedding layers that are sharded over a tensor-parallel group.

Shoeybi et al. 2019 (Megatron-LM):

    ColumnLinear   y_r = x W_r^T + b_r                    W sharded by outputs; y stays sharded
    RowLinear      y   = sum_r (x_r W_r^T + b / size)     W sharded by inputs; y is complete
    VocabEmbedding row lookup, and the tied projection    rows (tokens) sharded

The index r counts the ranks of the group. Under sequence parallelism, each rank passes only its own
positions to ColumnLinear, and RowLinear and VocabEmbedding return only these positions. In a group
of one rank, each layer computes the same as torch's layer. Weights are created uninitialised. The
model then draws each full parameter, with a seed that depends on the parameter's name. Each rank
stores only its slice.
"""

from torch import Tensor, nn

from megatron.numerics import WIDE, Numerics
from megatron.parallel.collectives import (
    enter_sharded,
    gather_from,
    leave_sharded,
    reduce_from,
    scatter_to,
    share_of,
)
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.matmul_library import linear
from megatron.parallel.rng import rank_dropout
from megatron.parallel.sharding import Sharding, mark_sharding


class Undrawn:
    """A layer whose weights are not drawn when it is built, because `initialise` draws them."""

    def reset_parameters(self) -> None:
        """Do nothing. torch would import its compiler to draw the values of an embedding."""


class ColumnLinear(Undrawn, nn.Linear):
    """Column-parallel linear layer, from [..., in_features] to [..., out_features / tp.size].

    Args:
        in_features: The full number of input features.
        out_features: The full number of output features.
        tp: The tensor-parallel group.
        blocks: The number of tensors that are stacked in the output and sharded separately. It is 2
            for the value and the gate of a gated MLP.
        numerics: The rules by which the layer rounds numbers.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: TensorGroup = ALONE,
        *, bias: bool = True, blocks: int = 1, numerics: Numerics = WIDE,
    ):  # fmt: skip
        super().__init__(in_features, out_features // tp.size, bias=bias)
        self.tp, self.numerics = tp, numerics
        for param in self.parameters():
            mark_sharding(param, Sharding(0, blocks), tp)

    def forward(self, x: Tensor) -> Tensor:
        return linear(enter_sharded(x, self.tp), self.weight, self.bias, self.numerics)


class RowLinear(Undrawn, nn.Linear):
    """Row-parallel linear layer, from [..., in_features / tp.size] to [..., out_features].

    Args:
        in_features: The full number of input features.
        out_features: The full number of output features.
        tp: The tensor-parallel group.
        scatter: Whether the input has all features, [..., in_features]. The layer then slices the
            input itself.
        numerics: The rules by which the layer rounds numbers.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: TensorGroup = ALONE,
        *, bias: bool = True, scatter: bool = False, numerics: Numerics = WIDE,
    ):  # fmt: skip
        super().__init__(in_features // tp.size, out_features, bias=bias)
        self.tp, self.scatter, self.numerics = tp, scatter, numerics
        mark_sharding(self.weight, Sharding(1), tp)

    def forward(self, x: Tensor, partial: bool = False) -> Tensor:
        """Return the layer's output, summed over the ranks.

        Args:
            x: This rank's slice of the input features. With `scatter`, `x` has all input features.
            partial: Whether to return this rank's output without the sum over the ranks.
        """
        if self.scatter:
            x = gather_from(x, self.tp, 1) if self.tp.splits_sequence else x
            x = scatter_to(x, self.tp, -1)
        bias = None if self.bias is None else share_of(self.bias, self.tp)
        y = linear(x, self.weight, bias, self.numerics)
        if partial:
            return y
        return reduce_from(y, self.tp) if self.scatter else leave_sharded(y, self.tp)


class VocabEmbedding(Undrawn, nn.Embedding):
    """Token embedding that is sharded over ranks by tokens. A tied output layer uses it, too.

    `forward(ids)` returns the embedding vectors. `forward(hidden, project=True)` returns this
    rank's slice of the logits.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorGroup = ALONE):
        super().__init__(vocab_size // tp.size, hidden_size)
        self.tp = tp
        mark_sharding(self.weight, Sharding(0), tp)

    def forward(self, x: Tensor, project: bool = False) -> Tensor:
        if project:  # here, because ZeRO-3 gathers the weight only while this module is called
            return linear(enter_sharded(x, self.tp), self.weight)
        if self.tp.size == 1:
            return super().forward(x)
        rows = self.num_embeddings
        local = x - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        vectors = super().forward(local.masked_fill(elsewhere, 0))
        return leave_sharded(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)


class HiddenDropout(nn.Dropout):
    """Dropout of hidden states under tensor and sequence parallelism.

    Ranks with the same hidden states draw the same dropout mask. Under sequence parallelism, the
    ranks have different hidden states, and draw different masks.
    """

    def __init__(self, p: float, tp: TensorGroup = ALONE):
        super().__init__(p)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p and self.tp.splits_sequence):
            return super().forward(x)
        with rank_dropout(self.tp, x.device):
            return super().forward(x)
