"""The language model: embedding -> blocks -> final norm -> output, read from top to bottom.

    x_0     = E[token] (+ position vector)          theta = the job's one kernel tensor
    x_{l+1} = block_l(x_l, theta)
    logits  = output(norm(x_L))                     output = E^T when the weights are tied

Legend: B batch, T positions, D hidden size, V padded vocabulary, H heads, N theta columns.

Theta flows as data: the embedding layer emits it in at least fp32 beside the hidden states and
every block reads that same tensor, so autograd sums its gradient over the layers in fp32. Under
bf16 the stored parameter is bf16; the optimizer's master is fp32.

Under tensor parallelism (`tp`) every value is drawn whole and then cut, theta by heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from megatron.attention import AttentionFn
from megatron.model.block import Block, BlockShape
from megatron.model.init import draw
from megatron.model.norm import build_norm
from megatron.parallel import (
    ALONE,
    ColumnLinear,
    Cut,
    RowLinear,
    TensorGroup,
    VocabEmbedding,
    gather_from,
    mark_cut,
    named_generator,
    own_part,
    token_losses,
    whole_shape,
)
from megatron.positional import PositionalEmbedding

BY_HEADS = Cut(0)
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
        cut_output_inputs: cut an untied output layer by its inputs (published: "row"), not by
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
    cut_output_inputs: bool = False


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
        return pos.within_bounds(pos.rounded(self.value).to(dtype))


def initial_theta(
    pos: PositionalEmbedding, heads: int, seed: int, tp: TensorGroup
) -> torch.Tensor:
    """Theta's first values for this rank's heads, fp32; drawn for all heads."""
    theta_HN = pos.initial_theta(heads, named_generator(seed, "embedding.theta"))
    return BY_HEADS.part(theta_HN, tp.rank, tp.size)


class EmbeddingLayer(nn.Module):
    """Tokens [B, T] -> (x [B, T, D], theta [H, N] fp32 or None).

    With `words=False` another layer looks the words up, and their vectors x come in.
    """

    def __init__(
        self,
        shape: GPTShape,
        pos: PositionalEmbedding,
        seed: int,
        tp: TensorGroup = ALONE,
        words: bool = True,
    ):
        super().__init__()
        self.pos, self.offset = pos, shape.position_offset
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
                mark_cut(self.theta, BY_HEADS, tp)
            else:
                self.fixed_theta = FixedTheta(theta_HN)
        self.dropout = nn.Dropout(shape.block.hidden_dropout)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_BTD = x if self.word_embeddings is None else self.word_embeddings(x)
        if self.pos.kind == "input":
            positions_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
            x_BTD = x_BTD + self._position_vectors(positions_T, x_BTD)
        return self.dropout(x_BTD), self._theta(x_BTD.dtype)

    def _position_vectors(self, positions_T: torch.Tensor, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.pos.name != "learned":
            table = self.pos.table(positions_T, x_BTD.shape[-1], x_BTD.dtype)
            return table.to(x_BTD.dtype)
        rows, length = self.position_embeddings.num_embeddings, positions_T.numel()
        if length + self.offset > rows:
            raise ValueError(
                f"pos_emb: learned has {rows - self.offset} positions, but a sequence of {length} "
                "came in; raise max_position_embeddings or choose an embedding that extrapolates, "
                "such as kerple_log"
            )
        return self.position_embeddings(positions_T + self.offset)

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
    ):
        super().__init__()
        self.shape, self.pos, self.attend = shape, pos, attend
        block = shape.block
        self.embedding = EmbeddingLayer(shape, pos, seed, tp)
        self.layers = nn.ModuleList(Block(block, pos, attend, tp) for _ in range(shape.num_layers))
        self.final_norm = build_norm(
            block.norm, block.hidden_size, block.norm_eps, block.rounds_as_published
        )
        self.output: nn.Linear | None = None
        if not shape.tie_weights:
            output, arguments = output_layer(shape, tp)
            self.output = output(**arguments)
        self.logits_tp = logits_group(shape, tp)
        self._initialise(seed)

    def forward(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, T, V], or the loss of each target [B, T] in nats when targets are given."""
        x_BTD, theta_HN = self.embedding(tokens_BT)
        recompute = self.shape.checkpoint_activations and self.training
        for layer in self.layers:
            if recompute:
                x_BTD = checkpoint(layer, x_BTD, theta_HN, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, theta_HN)
        x_BTD = self.final_norm(x_BTD)
        if targets_BT is None:
            return gather_from(self._logits(x_BTD), self.logits_tp)
        # Without gradients the logits of a long sequence need not exist all at once.
        width = x_BTD.shape[1]
        if not torch.is_grad_enabled():
            width = max(1, LOGITS_AT_ONCE // (x_BTD.shape[0] * self.shape.vocab_size))
        pieces = zip(x_BTD.split(width, dim=1), targets_BT.split(width, dim=1), strict=True)
        return torch.cat([self._losses(x, targets) for x, targets in pieces], dim=1)

    def _losses(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return token_losses(self._logits(x_BTD), targets_BT, self.logits_tp)

    def _logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V], or this rank's part of V where the output is cut by tokens."""
        if self.output is None:
            return self.embedding.word_embeddings(x_BTD, project=True)
        return self.output(x_BTD)

    @property
    def theta(self) -> nn.Parameter | None:
        """The learned kernel parameters [H, N], or None."""
        return self.embedding.theta

    def _initialise(self, seed: int) -> None:
        initialise(self.named_parameters(), self.shape, seed)


def output_layer(shape: GPTShape, tp: TensorGroup) -> tuple[type[nn.Linear], dict[str, Any]]:
    """Class and arguments of the output layer of untied weights."""
    sizes = {"in_features": shape.block.hidden_size, "out_features": shape.vocab_size}
    sizes |= {"tp": tp, "bias": False}
    if shape.cut_output_inputs:
        return RowLinear, sizes | {"scatter": True}
    return ColumnLinear, sizes


def logits_group(shape: GPTShape, tp: TensorGroup) -> TensorGroup:
    """The group over which the logits' vocabulary is cut."""
    return ALONE if shape.cut_output_inputs and not shape.tie_weights else tp


@torch.no_grad()
def initialise(
    parameters: Iterable[tuple[str, nn.Parameter]], shape: GPTShape, seed: int
) -> None:
    """Give each named parameter its first value, a function of seed and name alone."""
    for name, param in parameters:
        leaf = name.rsplit(".", 1)[-1]
        if name == "embedding.theta":
            continue  # drawn by the embedding itself
        if leaf == "bias":
            param.zero_()
        elif param.ndim == 1:
            param.fill_(1.0)  # norm weights
        else:
            residual = ".attention.dense." in name or ".mlp.dense_4h_to_h." in name
            method = shape.output_init_method if residual else shape.init_method
            value = draw(
                method,
                whole_shape(param),
                named_generator(seed, name),
                std=shape.init_std,
                num_layers=shape.num_layers,
                hidden_size=shape.block.hidden_size,
            )
            param.copy_(own_part(param, value))
