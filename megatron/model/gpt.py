"""The language model: embedding -> blocks -> final norm -> output, read from top to bottom.

    x_0     = E[token] (+ position vector)          theta = the job's one kernel tensor
    x_{l+1} = block_l(x_l, theta)
    logits  = output(norm(x_L))                     output = E^T when the weights are tied

Legend: B batch, T positions, D hidden size, V padded vocabulary, H heads, N theta columns.

Theta flows as data: the embedding layer emits it in at least fp32 beside the hidden states and
every block reads that same tensor, so autograd sums its gradient over the layers in fp32. Under
bf16 the stored parameter is bf16; the optimizer's master is fp32.

Under tensor parallelism (`tp`) every value is drawn whole and then cut, theta by heads. The ranks
of `cp` have the same weights and different positions; where `tp` cuts the sequence too, its ranks
have different positions between the layers that are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from megatron.attention import AttentionFn
from megatron.model.block import Block, BlockShape
from megatron.model.init import initialise
from megatron.model.norm import build_norm
from megatron.parallel import (
    ALONE,
    ColumnLinear,
    HiddenDropout,
    RowLinear,
    Sharding,
    TensorGroup,
    VocabEmbedding,
    all_gather,
    copy_to,
    gather_from,
    mark_sharding,
    named_generator,
    token_losses,
)
from megatron.positional import PositionalEmbedding

BY_HEADS = Sharding(0)
LOGITS_AT_ONCE = 1 << 26
"""Logits held at a time when no gradient is asked for (256 MB in fp32)."""


@dataclass(frozen=True)
class GPTShape:
    """Everything that fixes the model's parameters and formula, as plain values.

    Attributes:
        vocab_size: padded vocabulary size V.
        max_positions: rows of the position table (`learned` only).
        position_offset: added to every position of `learned`, within those rows (OPT uses 2).
        checkpoint_activations: recompute each block in the backward pass.
        row_parallel_output: cut an untied output layer by its inputs (published: "row"), not by
            tokens. The same function.
    """

    num_layers: int
    vocab_size: int
    block: BlockShape
    max_positions: int
    tie_weights: bool = False
    init_method: str = "normal"
    output_init_method: str = "scaled_normal"
    init_std: float = 0.02
    position_offset: int = 0
    checkpoint_activations: bool = False
    row_parallel_output: bool = False


class FixedTheta(nn.Module):
    """Theta of an embedding that learns nothing (ALiBi's slopes): moves with the model, stays fp32.

    A plain buffer would be rounded to bf16 when the engine casts the module.
    """

    def __init__(self, theta_HN: torch.Tensor):
        super().__init__()
        self.register_buffer("value", theta_HN.float(), persistent=False)

    def _apply(self, fn, recurse=True):
        exact = self.value
        super()._apply(fn, recurse)
        self.value = exact.to(self.value.device)
        return self

    def forward(self, pos: PositionalEmbedding, dtype: torch.dtype) -> torch.Tensor:
        """Theta [H, N] in `dtype`, rounded and bounded as `pos` asks."""
        return pos.within_bounds(pos.numerics.constant(self.value).to(dtype))


def initial_theta(pos: PositionalEmbedding, heads: int, seed: int, tp: TensorGroup) -> torch.Tensor:
    """Theta's first values for this rank's heads, fp32; drawn for all heads."""
    theta_HN = pos.initial_theta(heads, named_generator(seed, "embedding.theta"))
    return BY_HEADS.slice(theta_HN, tp.rank, tp.size)


class EmbeddingLayer(nn.Module):
    """Tokens [B, T] -> (x [B, T, D], theta [H, N] fp32 or None).

    With `words=False` another layer looks the words up, and their vectors x come in. T counts the
    positions that this rank has of the sequence, cut by `cp` and then by `tp`.
    """

    def __init__(
        self,
        shape: GPTShape,
        pos: PositionalEmbedding,
        seed: int,
        tp: TensorGroup = ALONE,
        words: bool = True,
        cp: TensorGroup = ALONE,
    ):
        super().__init__()
        self.pos, self.offset, self.tp, self.cp = pos, shape.position_offset, tp, cp
        hidden, heads = shape.block.hidden_size, shape.block.num_heads
        self.word_embeddings: VocabEmbedding | None = None
        if words:
            self.word_embeddings = VocabEmbedding(shape.vocab_size, hidden, tp)
        if pos.name == "learned":
            self.position_embeddings = skip_init(nn.Embedding, shape.max_positions, hidden)
        self.fixed_theta: FixedTheta | None = None
        self.theta: nn.Parameter | None = None
        if pos.kind == "distance":
            theta_HN = initial_theta(pos, heads, seed, tp)
            if pos.learnable:
                self.theta = nn.Parameter(theta_HN)
                mark_sharding(self.theta, BY_HEADS, tp)
            else:
                self.fixed_theta = FixedTheta(theta_HN)
        self.dropout = HiddenDropout(shape.block.hidden_dropout, tp)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_BTD = x if self.word_embeddings is None else self.word_embeddings(x)
        if self.pos.kind == "input":
            before = self.cp.rank
            if self.tp.splits_sequence:
                before = before * self.tp.size + self.tp.rank
            first = before * x_BTD.shape[1]
            positions_T = torch.arange(first, first + x_BTD.shape[1], device=x_BTD.device)
            x_BTD = x_BTD + self._position_vectors(positions_T, x_BTD)
        return self.dropout(x_BTD), self._theta(x_BTD.dtype)

    def _position_vectors(self, positions_T: torch.Tensor, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.pos.name != "learned":
            table = self.pos.table(positions_T, x_BTD.shape[-1], x_BTD.dtype)
            return table.to(x_BTD.dtype)
        parts = self.cp.size * (self.tp.size if self.tp.splits_sequence else 1)
        self.require_positions(int(positions_T[-1]) + 1 - (parts - 1))
        table = self.position_embeddings.weight
        rows_T = (positions_T + self.offset).clamp(max=table.shape[0] - 1)  # padding may lie beyond
        if self.tp.splits_sequence:
            table = copy_to(table, self.tp)  # its rows serve other positions on other ranks
        return F.embedding(rows_T, table)

    def require_positions(self, length: int) -> None:
        """Raises ValueError where `learned` has no vector for each of `length` positions."""
        if self.pos.name != "learned":
            return
        own = self.position_embeddings.num_embeddings - self.offset
        if length > own:
            raise ValueError(
                f"pos_emb: learned has {own} positions, but a sequence of {length} "
                "came in; raise max_position_embeddings or choose an embedding that extrapolates, "
                "such as kerple_log"
            )

    def _theta(self, dtype: torch.dtype) -> torch.Tensor | None:
        wide = torch.promote_types(dtype, torch.float32)
        if self.fixed_theta is not None:
            return self.fixed_theta(self.pos, wide)
        # A copy, never a view: a sharding engine frees the parameter's storage after this layer.
        return None if self.theta is None else self.theta.to(wide, copy=True)


class GPT(nn.Module):
    """Decoder-only language model. `forward(tokens)` gives logits, with targets token losses."""

    def __init__(
        self,
        shape: GPTShape,
        pos: PositionalEmbedding,
        attend: AttentionFn,
        seed: int,
        tp: TensorGroup = ALONE,
        cp: TensorGroup = ALONE,
    ):
        super().__init__()
        self.shape, self.pos, self.attend, self.tp, self.cp = shape, pos, attend, tp, cp
        block = shape.block
        self.embedding = EmbeddingLayer(shape, pos, seed, tp, cp=cp)
        self.layers = nn.ModuleList(
            Block(block, pos, attend, tp, cp) for _ in range(shape.num_layers)
        )
        self.final_norm = build_norm(
            block.norm, block.hidden_size, block.norm_eps, block.numerics, tp
        )
        self.output: nn.Linear | None = None
        if not shape.tie_weights:
            output, arguments = output_layer(shape, tp)
            self.output = output(**arguments)
        self.logits_tp = logits_group(shape, tp)
        initialise(self.named_parameters(), shape, seed)

    def forward(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, T, V], or the loss of each target [B, T] in nats when targets are given.

        Every rank gets them for the whole sequence, and gives the whole sequence.
        """
        length = tokens_BT.shape[1]
        self.embedding.require_positions(length)
        x_BTD, theta_HN = self.embedding(self._own_positions(tokens_BT))
        recompute = self.shape.checkpoint_activations and self.training
        for layer in self.layers:
            if recompute:
                x_BTD = checkpoint(layer, x_BTD, theta_HN, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, theta_HN)
        x_BTD = self.final_norm(x_BTD)
        if targets_BT is None:
            logits = gather_from(self._logits(x_BTD), self.logits_tp)
            return all_gather(logits, self.cp, 1)[:, :length]
        # Without gradients the logits of a long sequence need not exist all at once.
        width, parts = x_BTD.shape[1], self.tp.size if self.tp.splits_sequence else 1
        if not torch.is_grad_enabled():
            width = max(1, LOGITS_AT_ONCE // (x_BTD.shape[0] * parts * self.shape.vocab_size))
        targets_BRT = self._own_positions(targets_BT).unflatten(1, (parts, -1))  # R: parts
        pieces = zip(x_BTD.split(width, 1), targets_BRT.split(width, 2), strict=True)
        losses_BRT = torch.cat([self._losses(x, targets) for x, targets in pieces], dim=2)
        return all_gather(losses_BRT.flatten(1), self.cp, 1)[:, :length]

    def _own_positions(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence, padded behind (which causal attention never sees)."""
        parts = self.cp.size * (self.tp.size if self.tp.splits_sequence else 1)
        padded_BT = F.pad(tokens_BT, (0, -tokens_BT.shape[1] % parts))
        return padded_BT.chunk(self.cp.size, 1)[self.cp.rank]

    def _losses(self, x_BTD: torch.Tensor, targets_BRT: torch.Tensor) -> torch.Tensor:
        losses_BT = token_losses(self._logits(x_BTD), targets_BRT.flatten(1), self.logits_tp)
        return losses_BT.view(targets_BRT.shape)

    def _logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V], or this rank's part of V where the output is cut by tokens."""
        if self.output is None:
            return self.embedding.word_embeddings(x_BTD, project=True)
        return self.output(x_BTD)

    @property
    def theta(self) -> nn.Parameter | None:
        """The learned kernel parameters [H, N], or None."""
        return self.embedding.theta


def output_layer(shape: GPTShape, tp: TensorGroup) -> tuple[type[nn.Linear], dict[str, Any]]:
    """Class and arguments of the output layer of untied weights."""
    sizes = {"in_features": shape.block.hidden_size, "out_features": shape.vocab_size}
    sizes |= {"tp": tp, "bias": False}
    if shape.row_parallel_output:
        return RowLinear, sizes | {"scatter": True}
    return ColumnLinear, sizes


def logits_group(shape: GPTShape, tp: TensorGroup) -> TensorGroup:
    """The group over which the logits' vocabulary is cut."""
    return ALONE if shape.row_parallel_output and not shape.tie_weights else tp
