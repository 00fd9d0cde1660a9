"""The language model: embedding -> blocks -> final norm -> output, read from top to bottom.

    x_0     = E[token] (+ position vector)          theta = the job's one kernel tensor
    x_{l+1} = block_l(x_l, theta)
    logits  = output(norm(x_L))                     output = E^T when the weights are tied

Legend: B batch, T positions, D hidden size, V padded vocabulary, H heads, N theta columns.

Theta flows as data: the embedding layer emits it in at least fp32 beside the hidden states and
every block reads that same tensor, so autograd sums its gradient over the layers in fp32. Under
bf16 the stored parameter is bf16; the optimizer's master is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from megatron.attention import AttentionFn
from megatron.model.block import Block, BlockShape
from megatron.model.init import draw
from megatron.model.norm import build_norm
from megatron.parallel import named_generator, token_losses
from megatron.positional import PositionalEmbedding

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


class WordEmbeddings(nn.Embedding):
    """Token ids -> vectors, or (`project=True`) vectors -> logits with the same matrix.

    The tied output calls this module instead of reading its weight, so that a parameter-sharding
    engine gathers the weight around both uses.
    """

    def forward(self, x: torch.Tensor, project: bool = False) -> torch.Tensor:
        if project:
            return nn.functional.linear(x, self.weight)
        return super().forward(x)


class EmbeddingLayer(nn.Module):
    """Tokens [B, T] -> (x [B, T, D], theta [H, N] fp32 or None)."""

    def __init__(self, shape: GPTShape, pos: PositionalEmbedding, seed: int):
        super().__init__()
        self.pos, self.offset = pos, shape.position_offset
        hidden, heads = shape.block.hidden_size, shape.block.num_heads
        self.word_embeddings = skip_init(WordEmbeddings, shape.vocab_size, hidden)
        if pos.name == "learned":
            self.position_embeddings = skip_init(nn.Embedding, shape.max_positions, hidden)
        self.fixed_theta: FixedTheta | None = None
        self.theta: nn.Parameter | None = None
        if pos.kind == "distance":
            theta_HN = pos.initial_theta(heads, named_generator(seed, "embedding.theta"))
            if pos.learnable:
                self.theta = nn.Parameter(theta_HN)
            else:
                self.fixed_theta = FixedTheta(theta_HN)
        self.dropout = nn.Dropout(shape.block.hidden_dropout)

    def forward(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_BTD = self.word_embeddings(tokens_BT)
        if self.pos.kind == "input":
            length = tokens_BT.shape[1]
            positions_T = torch.arange(length, device=tokens_BT.device)
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
            return self.pos.within_bounds(self.pos.rounded(self.fixed_theta.value).to(wide))
        # A copy, never a view: a sharding engine frees the parameter's storage after this layer.
        return None if self.theta is None else self.theta.to(wide, copy=True)


class GPT(nn.Module):
    """Decoder-only language model. `forward(tokens)` gives logits, with targets token losses."""

    def __init__(self, shape: GPTShape, pos: PositionalEmbedding, attend: AttentionFn, seed: int):
        super().__init__()
        self.shape, self.pos = shape, pos
        block = shape.block
        self.embedding = EmbeddingLayer(shape, pos, seed)
        self.layers = nn.ModuleList(Block(block, pos, attend) for _ in range(shape.num_layers))
        self.final_norm = build_norm(
            block.norm, block.hidden_size, block.norm_eps, block.rounds_as_published
        )
        self.output: nn.Linear | None = None
        if not shape.tie_weights:
            self.output = skip_init(nn.Linear, block.hidden_size, shape.vocab_size, bias=False)
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
            return self._logits(x_BTD)
        # Without gradients the logits of a long sequence need not exist all at once.
        width = x_BTD.shape[1]
        if not torch.is_grad_enabled():
            width = max(1, LOGITS_AT_ONCE // (x_BTD.shape[0] * self.shape.vocab_size))
        pieces = zip(x_BTD.split(width, dim=1), targets_BT.split(width, dim=1), strict=True)
        return torch.cat([token_losses(self._logits(x), targets) for x, targets in pieces], dim=1)

    def _logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.output is None:
            return self.embedding.word_embeddings(x_BTD, project=True)
        return self.output(x_BTD)

    @property
    def theta(self) -> nn.Parameter | None:
        """The learned kernel parameters [H, N], or None."""
        return self.embedding.theta

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        shape = self.shape
        for name, param in self.named_parameters():
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
                    param.shape,
                    named_generator(seed, name),
                    std=shape.init_std,
                    num_layers=shape.num_layers,
                    hidden_size=shape.block.hidden_size,
                )
                param.copy_(value)
