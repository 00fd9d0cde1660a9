"""Define one transformer block in GPT-NeoX's conventions.

    pre-norm         x = x + drop(attention(norm1(x)));  x = x + drop(mlp(norm2(x)))
    gpt_j_residual   x = x + (drop(attention(norm1(x))) + drop(mlp(norm2(x))))
    output_norms     x = x + drop(norm1(attention(x)));  x = x + drop(norm2(mlp(x)))

With `gpt_j_tied`, norm2 is norm1.

Legend: B batch, T positions, D hidden size, H heads, K key heads, E head size (by default D / H), N
columns of theta, drop dropout.

One fused projection computes queries, keys and values (see `heads`). With `output_gate`, the
output of attention (before the projection `dense`) is multiplied by the gate sigmoid(W norm1(x) +
b), one number for each head and channel (arXiv 2505.06708, `attention_output_gate` in Megatron).

Theta holds the parameters of the distance kernel, a bias or factor that depends only on the
query-key distance. The model has one theta, which every block gets as an input. If layers have
different positional embeddings, each block reads its own columns of theta.

Under tensor parallelism, H counts only this rank's heads, and theta has one row for each of them.
Under context parallelism (`cp`), T is the number of this rank's positions. Inside attention, each
rank instead holds all positions, but fewer heads. `gpt_j_residual` adds the outputs of attention
and MLP before the reduction over ranks, so that one reduction suffices.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from megatron.attention import Call
from megatron.model.activations import ACTIVATIONS, GATES, activate, stepwise_tanh_gelu
from megatron.model.block_norm import BlockNorm
from megatron.model.cache import LayerCache
from megatron.model.heads import by_key_heads, divide_heads, normed_heads
from megatron.model.qk_norm import OwnNorm
from megatron.model.shape import Plan
from megatron.parallel.collectives import add_partial, all_to_all
from megatron.parallel.groups import ALONE
from megatron.parallel.layers import ColumnLinear, HiddenDropout, RowLinear
from megatron.parallel.rng import rank_dropout
from megatron.parallel.sharding import mark_fused
from megatron.positional import PositionalEmbedding


class SelfAttention(nn.Module):
    """Causal self-attention. Input and output are [batch, positions, hidden size].

    Args:
        plan: The description of the model.
        index: The number of the layer, counted from 0.
    """

    def __init__(self, plan: Plan, index: int):
        super().__init__()
        layer = plan.layer(index)
        self.pos, self.attend, self.window = layer.pos, layer.attend, layer.window
        self.columns, self.tp, self.cp = layer.columns, plan.tp, plan.cp
        self.documents = plan.documents
        self.fading: PositionalEmbedding | None = None  # a rotary embedding that training removes
        self.shape = shape = plan.shape.block
        hidden, tp = shape.hidden_size, plan.tp
        bias, E = shape.attention_bias, shape.head_size
        inner, key_heads = shape.num_heads * E, shape.num_heads // shape.group
        widths = inner + 2 * key_heads * E  # of queries, of keys and values
        self.query_key_value = ColumnLinear(hidden, widths, tp, bias=bias or shape.qkv_bias)
        mark_fused(self.query_key_value.weight, (shape.group * E, E, E))
        by_head = shape.qk_norm and shape.qk_norm_kind == "by_head"
        self.qk_layernorm = BlockNorm(shape, tp, by_head=True) if by_head else None
        key_heads //= tp.size
        own = shape.qk_norm and not by_head
        self.query_norm = OwnNorm(shape, key_heads * shape.group, tp) if own else None
        self.key_norm = OwnNorm(shape, key_heads, tp) if own else None
        self.dense = RowLinear(inner, hidden, tp, bias=bias, numerics=shape.numerics)
        # Context parallelism needs a multiple of `cp.size` key heads.
        self.copies = self.cp.size // math.gcd(key_heads, self.cp.size)
        self.gate = ColumnLinear(hidden, shape.num_heads, tp) if self.pos.has("gate") else None
        gated = shape.output_gate
        self.output_gate = ColumnLinear(hidden, inner, tp, bias=bias) if gated else None

    # theta_HN are the positional embedding's parameters, or None. starts_BS [B, all positions] is
    # the position at which each token's document starts, or None if each sequence is one
    # document. `partial` leaves out the sum over tensor-parallel ranks. `cache` has the keys and
    # values of earlier tokens.
    def forward(
        self,
        x_BTD: torch.Tensor,
        theta_HN: torch.Tensor | None,
        starts_BS: torch.Tensor | None = None,
        partial: bool = False,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        s = self.shape
        q_BHTE, k_BHTE, v_BHTE = self.queries_keys_values(x_BTD)
        if theta_HN is not None:
            theta_HN = theta_HN[:, self.columns].chunk(self.cp.size)[self.cp.rank]
        positions_BT = None
        if self.documents is not None and starts_BS is not None:
            positions_BT = self.documents.positions(starts_BS)
            starts_BS = None if self.documents.end is None else starts_BS
        if cache is not None:
            positions_BT = cache.positions(x_BTD.shape[1])
        ndims, base = s.rotary_ndims, s.rotary_base
        q_BHTE, k_BHTE = (self.fading or self.pos).rotate(
            q_BHTE, k_BHTE, positions_BT=positions_BT, rotary_ndims=ndims, base=base
        )
        decay_BHS, query_offset, sequence_positions_BT = self._decay(x_BTD), 0, None
        if cache is not None:
            if self.pos.reads_position or self.pos.tempers_bias:
                sequence_positions_BT = positions_BT
                positions_BT = cache.positions(x_BTD.shape[1], in_document=True)
            kept = cache.extend(k_BHTE, v_BHTE, decay_BHS)
            k_BHTE, v_BHTE, decay_BHS, starts_BS, query_offset = kept
        dropout_p = s.attention_dropout if self.training else 0.0
        with rank_dropout(self.tp, x_BTD.device) if dropout_p else nullcontext():
            call = Call(
                q_BHTE, k_BHTE, v_BHTE, self.pos, theta_HN, scale=1.0 / math.sqrt(s.head_size),
                dropout_p=dropout_p, query_offset=query_offset, decay_BHS=decay_BHS,
                starts_BS=starts_BS, window=self.window, positions_BT=positions_BT,
                sequence_positions_BT=sequence_positions_BT,
            )  # fmt: skip
            out_BHTE = self.attend(call)
        out_BHTE = all_to_all(out_BHTE, self.cp, split=2, join=1)
        out_BTD = out_BHTE.transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            out_BTD = out_BTD * self.output_gate(x_BTD).sigmoid()
        return self.dense(out_BTD, partial)

    def queries_keys_values(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v [batch, heads, positions, head size]."""
        shape, qkv_BTW = self.shape, self.query_key_value(x_BTD)
        size, group = shape.head_size, shape.group
        if self.query_norm is not None and self.key_norm is not None:
            norms, joined = (self.query_norm, self.key_norm), shape.qk_norm_kind == "joined"
            qkv_BTW = normed_heads(qkv_BTW, group, size, norms, joined=joined)
        qkv_BKTW = by_key_heads(qkv_BTW, group, size, self.qk_layernorm, copies=self.copies)
        # Now fewer heads, all positions.
        # For all positions, and this rank's heads.
        return divide_heads(all_to_all(qkv_BKTW, self.cp, split=1, join=2), size)

    def _decay(self, x_BTD: torch.Tensor) -> torch.Tensor | None:
        """Return the cumulative log-decay of the forget gates [batch, heads, positions].

        Return None if the model has no forget gates.
        """
        if self.gate is None:
            return None
        gate_BHT1 = self.gate(x_BTD).transpose(1, 2)[..., None]
        return self.pos.decay(all_to_all(gate_BHT1, self.cp, split=1, join=2)[..., 0])


@contextmanager
def limited_window(model: nn.Module, tokens: int | None) -> Iterator[None]:
    """Within the `with` block, let each query see only the last `tokens` tokens.

    The query's own token is one of them. If `tokens` is None, nothing changes.
    """
    layers = [each for each in model.modules() if isinstance(each, SelfAttention)]
    before = [layer.window for layer in layers]
    if tokens is not None:
        for layer, window in zip(layers, before, strict=True):
            # A layer that already has a shorter window keeps it.
            layer.window = min(tokens - 1, tokens if window is None else window)
    try:
        yield
    finally:
        for layer, window in zip(layers, before, strict=True):
            layer.window = window


class MLP(nn.Module):
    """The MLP of a block. Input and output are [batch, positions, hidden size]."""

    def __init__(self, plan: Plan):
        super().__init__()
        shape, tp = plan.shape.block, plan.tp
        self.activation, self.tanh_gelu = shape.activation, shape.tanh_gelu
        self.numerics = shape.numerics
        hidden, inner = shape.hidden_size, shape.mlp_size
        halves = 2 if shape.activation in GATES else 1
        common = {"bias": shape.mlp_bias, "numerics": shape.numerics}
        # Of a gated MLP, this layer computes a value and a gate. The second layer gets f(gate) *
        # value.
        self.dense_h_to_4h = ColumnLinear(hidden, halves * inner, tp, blocks=halves, **common)
        mark_fused(self.dense_h_to_4h.weight, (inner // tp.size,) * halves)
        self.dense_4h_to_h = RowLinear(inner, hidden, tp, **common)

    def forward(self, x_BTD: torch.Tensor, partial: bool = False) -> torch.Tensor:
        return self.dense_4h_to_h(self.activate(self.dense_h_to_4h(x_BTD)), partial)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        functions = _PUBLISHED if self.numerics.published else ACTIVATIONS
        return activate(x, self.activation, tanh=self.tanh_gelu, functions=functions)


# The same functions, rounded after each operation.
_PUBLISHED = {
    **ACTIVATIONS,
    "tanh_gelu": stepwise_tanh_gelu,
    "swish": lambda x: x * torch.sigmoid(x),
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
}


class Block(nn.Module):
    """One transformer block. Input and output are [batch, positions, hidden size]."""

    def __init__(self, plan: Plan, index: int):
        super().__init__()
        shape, tp = plan.shape.block, plan.tp
        self.gpt_j_residual, self.tp = shape.gpt_j_residual, tp
        self.input_layernorm = None if shape.output_norms else BlockNorm(shape, tp)
        self.attention = SelfAttention(plan, index)
        self.post_attention_layernorm = None if shape.gpt_j_tied else BlockNorm(shape, tp)
        self.mlp = MLP(plan)
        self.post_mlp_layernorm = BlockNorm(shape, tp) if shape.output_norms else None
        # Parallel branches drop before the sum over ranks. Then all ranks hold all positions of a
        # partial sum and need the same mask.
        self.dropout = HiddenDropout(shape.hidden_dropout, ALONE if shape.gpt_j_residual else tp)

    def forward(
        self,
        x_BTD: torch.Tensor,
        theta_HN: torch.Tensor | None,
        starts_BS: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        partial, second = self.gpt_j_residual, self.post_attention_layernorm
        normed_BTD = x_BTD if self.input_layernorm is None else self.input_layernorm(x_BTD)
        attention = self.attention(normed_BTD, theta_HN, starts_BS, partial, cache)
        if partial:
            mlp = self.mlp(normed_BTD if second is None else second(x_BTD), partial=True)
            return add_partial(x_BTD, self.dropout(attention), self.dropout(mlp), tp=self.tp)
        assert second is not None
        if self.post_mlp_layernorm is not None:
            x_BTD = x_BTD + self.dropout(second(attention))
            return x_BTD + self.dropout(self.post_mlp_layernorm(self.mlp(x_BTD)))
        x_BTD = x_BTD + self.dropout(attention)
        return x_BTD + self.dropout(self.mlp(second(x_BTD)))
