"""One transformer block in GPT-NeoX's conventions.

    pre-norm         x = x + drop(attention(norm1(x)));  x = x + drop(mlp(norm2(x)))
    gpt_j_residual   x = x + (drop(attention(norm1(x))) + drop(mlp(norm2(x))))

Legend: B batch, T positions, D hidden size, H heads, E head size (D = H E), N theta columns.
The fused projection is interleaved per head: its output is [H, (q k v), E], as in the released
checkpoints. Theta is the job's one kernel tensor; it flows through every block beside x.

Under tensor parallelism H, and the theta that comes in, count this rank's heads; the layers know
how they are cut. Under context parallelism (`cp`) T counts this rank's positions, but in attention
all, of fewer heads. `gpt_j_residual` adds both branches up before the ranks do, in one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron.attention import AttentionFn
from megatron.model.norm import build_norm
from megatron.numerics import WIDE, Numerics
from megatron.parallel import (
    ALONE,
    ColumnLinear,
    HiddenDropout,
    RowLinear,
    TensorGroup,
    add_partial,
    all_to_all,
    rank_dropout,
)
from megatron.positional import PositionalEmbedding


@dataclass(frozen=True)
class BlockShape:
    """What a block needs to know, as plain values.

    Attributes:
        tanh_gelu: the tanh form of gelu.
        numerics: where norms, activations and biased products round 16-bit numbers.
    """

    hidden_size: int
    num_heads: int
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    gpt_j_residual: bool = False
    activation: str = "gelu"
    tanh_gelu: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rotary_pct: float = 1.0
    rotary_base: float = 10000.0
    numerics: Numerics = WIDE

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Inner width of the MLP: 4 D, or int(8/3 D) for geglu, which has two such halves."""
        if self.activation == "geglu":
            return int(4 * 2 / 3 * self.hidden_size)
        return 4 * self.hidden_size


class SelfAttention(nn.Module):
    """Causal self-attention; `attend` is the backend that start-up chose."""

    def __init__(
        self,
        shape: BlockShape,
        pos: PositionalEmbedding,
        attend: AttentionFn,
        tp: TensorGroup = ALONE,
        cp: TensorGroup = ALONE,
    ):
        super().__init__()
        self.shape, self.pos, self.attend, self.tp, self.cp = shape, pos, attend, tp, cp
        hidden = shape.hidden_size
        self.rotary_ndims = int(shape.head_size * shape.rotary_pct)
        self.query_key_value = ColumnLinear(hidden, 3 * hidden, tp)
        self.dense = RowLinear(hidden, hidden, tp, numerics=shape.numerics)

    def forward(
        self, x_BTD: torch.Tensor, theta_HN: torch.Tensor | None, partial: bool = False
    ) -> torch.Tensor:
        s = self.shape
        qkv = self.query_key_value(x_BTD)
        qkv = qkv.unflatten(-1, (-1, 3 * s.head_size)).transpose(1, 2)  # [B, H, T, 3E]
        qkv = all_to_all(qkv, self.cp, split=1, join=2)  # fewer heads, all positions
        if theta_HN is not None:
            theta_HN = theta_HN.chunk(self.cp.size)[self.cp.rank]
        q_BHTE, k_BHTE, v_BHTE = qkv.chunk(3, dim=-1)
        if self.pos.kind == "rotary":
            q_BHTE, k_BHTE = self.pos.rotate(
                q_BHTE, k_BHTE, offset=0, rotary_ndims=self.rotary_ndims, base=s.rotary_base
            )
        dropout_p = s.attention_dropout if self.training else 0.0
        with rank_dropout(self.tp, x_BTD.device) if dropout_p else nullcontext():
            out_BHTE = self.attend(
                q_BHTE,
                k_BHTE,
                v_BHTE,
                self.pos,
                theta_HN,
                scale=1.0 / math.sqrt(s.head_size),
                dropout_p=dropout_p,
            )
        out_BHTE = all_to_all(out_BHTE, self.cp, split=2, join=1)
        return self.dense(out_BHTE.transpose(1, 2).flatten(2), partial)


class MLP(nn.Module):
    """D -> inner width -> D."""

    def __init__(self, shape: BlockShape, tp: TensorGroup = ALONE):
        super().__init__()
        self.activation, self.tanh_gelu = shape.activation, shape.tanh_gelu
        self.numerics = shape.numerics
        hidden, inner = shape.hidden_size, shape.mlp_size
        halves = 2 if shape.activation == "geglu" else 1
        self.dense_h_to_4h = ColumnLinear(
            hidden, halves * inner, tp, blocks=halves, numerics=shape.numerics
        )
        self.dense_4h_to_h = RowLinear(inner, hidden, tp, numerics=shape.numerics)

    def forward(self, x_BTD: torch.Tensor, partial: bool = False) -> torch.Tensor:
        return self.dense_4h_to_h(self._activate(self.dense_h_to_4h(x_BTD)), partial)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "gelu" and self.tanh_gelu:
            # torch's constant differs in the tenth digit, which float64 alone can see.
            exact = self.numerics.published or x.dtype == torch.float64
            return published_tanh_gelu(x) if exact else F.gelu(x, approximate="tanh")
        if self.activation == "gelu":
            return F.gelu(x)
        if self.activation == "geglu":
            value, gate = x.chunk(2, dim=-1)
            return F.gelu(gate) * value
        by_name = PUBLISHED_ACTIVATIONS if self.numerics.published else ACTIVATIONS
        return by_name[self.activation](x)


def published_tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """x / 2 (1 + tanh(0.79788456 x (1 + 0.044715 x^2))), rounded after each operation."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "softsign": F.softsign,
    "swish": F.silu,
    "mish": F.mish,
}
# The same functions, rounded after each operation.
PUBLISHED_ACTIVATIONS = ACTIVATIONS | {
    "swish": lambda x: x * torch.sigmoid(x),
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
}


class Block(nn.Module):
    """(x [B, T, D], theta [H, N] or None) -> x [B, T, D]."""

    def __init__(
        self,
        shape: BlockShape,
        pos: PositionalEmbedding,
        attend: AttentionFn,
        tp: TensorGroup = ALONE,
        cp: TensorGroup = ALONE,
    ):
        super().__init__()
        self.gpt_j_residual, self.tp = shape.gpt_j_residual, tp
        norm = shape.norm, shape.hidden_size, shape.norm_eps, shape.numerics, tp
        self.input_layernorm = build_norm(*norm)
        self.attention = SelfAttention(shape, pos, attend, tp, cp)
        self.post_attention_layernorm = build_norm(*norm)
        self.mlp = MLP(shape, tp)
        # In parallel, dropout comes before the sum over ranks: at all positions, alike on each.
        alike = ALONE if shape.gpt_j_residual else tp
        self.dropout = HiddenDropout(shape.hidden_dropout, alike)

    def forward(self, x_BTD: torch.Tensor, theta_HN: torch.Tensor | None) -> torch.Tensor:
        if self.gpt_j_residual:
            attention = self.attention(self.input_layernorm(x_BTD), theta_HN, partial=True)
            mlp = self.mlp(self.post_attention_layernorm(x_BTD), partial=True)
            return add_partial(x_BTD, self.dropout(attention), self.dropout(mlp), tp=self.tp)
        attention = self.dropout(self.attention(self.input_layernorm(x_BTD), theta_HN))
        x_BTD = x_BTD + attention
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))
