"""Linear and embedding layers, sharded over a tensor-parallel group (Shoeybi et al. 2019).

    ColumnLinear   y_r = x W_r^T + b_r                    W sharded by outputs; y stays sharded
    RowLinear      y   = sum_r (x_r W_r^T + b / size)     W sharded by inputs; y is complete
    VocabEmbedding row lookup, and the tied projection    rows (tokens) sharded

r counts the ranks of the group. Under sequence parallelism the input of ColumnLinear, and the
output of RowLinear and of VocabEmbedding, hold only this rank's positions. In a group of one each
layer is torch's own. Weights are created uninitialised; the model draws the full tensors by name,
and each rank keeps its slice.
"""

from __future__ import annotations

import torch.nn.functional as F
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
from megatron.parallel.rng import rank_dropout
from megatron.parallel.sharding import Sharding, mark_sharding


class ColumnLinear(nn.Linear):
    """[..., in] -> this rank's [..., out / size].

    Args:
        blocks: tensors stacked in the output, each sharded separately (2: value and gate).
        numerics: how product and bias are rounded.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: TensorGroup = ALONE,
        *, bias: bool = True, blocks: int = 1, numerics: Numerics = WIDE,
    ):  # fmt: skip
        super().__init__(in_features, out_features // tp.size, bias=bias, device="meta")
        self.to_empty(device="cpu")
        self.tp, self.numerics = tp, numerics
        for param in self.parameters():
            mark_sharding(param, Sharding(0, blocks), tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.numerics.linear(enter_sharded(x, self.tp), self.weight, self.bias)


class RowLinear(nn.Linear):
    """This rank's [..., in / size] -> [..., out].

    Args:
        scatter: the input is complete and is sliced here.
        numerics: how product and bias are rounded.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: TensorGroup = ALONE,
        *, bias: bool = True, scatter: bool = False, numerics: Numerics = WIDE,
    ):  # fmt: skip
        super().__init__(in_features // tp.size, out_features, bias=bias, device="meta")
        self.to_empty(device="cpu")
        self.tp, self.scatter, self.numerics = tp, scatter, numerics
        mark_sharding(self.weight, Sharding(1), tp)

    def forward(self, x: Tensor, partial: bool = False) -> Tensor:
        """The sum over ranks, or with `partial` this rank's addend: the caller reduces it."""
        if self.scatter:
            x = gather_from(x, self.tp, 1) if self.tp.splits_sequence else x
            x = scatter_to(x, self.tp, -1)
        bias = None if self.bias is None else share_of(self.bias, self.tp)
        y = self.numerics.linear(x, self.weight, bias)
        if partial:
            return y
        return reduce_from(y, self.tp) if self.scatter else leave_sharded(y, self.tp)


class VocabEmbedding(nn.Embedding):
    """Token ids -> vectors, or (`project=True`) vectors -> this rank's logits with the same matrix.

    A tied output layer calls this module and does not read its weight: an engine that shards
    parameters (ZeRO-3) gathers the weight around each call.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorGroup = ALONE):
        super().__init__(vocab_size // tp.size, hidden_size, device="meta")
        self.to_empty(device="cpu")
        self.tp = tp
        mark_sharding(self.weight, Sharding(0), tp)

    def forward(self, x: Tensor, project: bool = False) -> Tensor:
        if project:
            return F.linear(enter_sharded(x, self.tp), self.weight)
        if self.tp.size == 1:
            return super().forward(x)
        rows = self.num_embeddings
        local = x - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        vectors = super().forward(local.masked_fill(elsewhere, 0))
        return leave_sharded(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)


class HiddenDropout(nn.Dropout):
    """Dropout of hidden states: one mask for all ranks of `tp`, unless they split the sequence."""

    def __init__(self, p: float, tp: TensorGroup = ALONE):
        super().__init__(p)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p and self.tp.splits_sequence):
            return super().forward(x)
        with rank_dropout(self.tp, x.device):
            return super().forward(x)
