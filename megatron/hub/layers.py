"""Define the configuration and the layers of an exported model (see `modeling_kerple`).

The weights have the same names as in `megatron.model.GPT`. Norms, activations, heads and attention
(the backend `eager`) have the same formulas. Dropout is left out.

Legend: B texts, T new tokens, S all tokens (cached ones and new ones), D hidden size, H heads, K
key heads, E head size, G query heads per key head, N columns of theta, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from megatron.attention.call import Call, lowered
from megatron.attention.eager import eager
from megatron.model.activations import GATES, activate
from megatron.model.heads import by_key_heads, divide_heads, normed_heads
from megatron.model.norm import Norm
from megatron.positional.base import PositionalEmbedding


class KerpleConfig(PretrainedConfig):
    """The content of config.json.

    Args:
        norm: `layernorm`, `rmsnorm` (epsilon outside the root), `fused_rmsnorm` (epsilon inside the
            root) or `scalenorm`.
        intermediate_size: The inner width of the MLP.
        head_size: The size of a head; None means hidden_size / num_attention_heads.
        qk_norm_kind: The kind of the norm of queries and keys: `by_head`, `shared` or `joined`.
        output_norms: Whether norms are applied to the outputs of attention and MLP, not to their
            inputs.
        gpt_j_tied: Whether attention and MLP share one norm.
        qkv_bias: Whether queries, keys and values have a bias even without `attention_bias`.
        output_bias: Whether the output layer has a bias.
        output_gate: Whether attention's output is multiplied by a sigmoid gate of its input.
        pos_emb: The positional embedding of each layer, or one name for all layers.
        pos_emb_options: Maps names of positional embeddings to their options.
        theta_per_layer: Whether each layer has its own parameters of the positional embedding.
        distance_scale: The factor on all query-key distances.
        windows: For each layer, the largest distance of a key that a query sees; None sets no
            limit.
        document_end: The id of the token that ends a document, if tokens attend only to their own
            document.
        restart_positions: Whether positions restart at 0 with each document.
        position_offset: The row of position 0 in a trained position table.
    """

    model_type = "kerple"

    def __init__(
        self, vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=64, max_position_embeddings=64, norm="layernorm",
        norm_eps=1e-5, qk_norm=False, output_gate=False, activation="gelu", tanh_gelu=False,
        attention_bias=True, mlp_bias=True, gpt_j_residual=False, rotary_ndims=16,
        rotary_base=10000.0, pos_emb="none", pos_emb_options=None, theta_per_layer=False,
        distance_scale=1.0, windows=None, document_end=None, restart_positions=False,
        position_offset=0, head_size=None, qk_norm_kind="by_head", output_norms=False,
        gpt_j_tied=False, qkv_bias=False, output_bias=False, use_cache=True, **kwargs,
    ):  # fmt: skip
        own = dict(locals())
        for name in ("self", "kwargs", "__class__"):
            own.pop(name, None)
        super().__init__(**kwargs)
        for name, value in own.items():
            setattr(self, name, value)


@dataclass
class Columns:
    """Properties of the tokens in a padded batch, which all layers need.

    Column s of the batch holds token s of each text. Padding and cached tokens are counted, too.

    Attributes:
        cached: The number of cached tokens of each text. They come before the new tokens.
        positions_BT: The position of each new token.
        padding_BTS: Whether column s is padding that new token t must not see. A padding token
            sees itself.
        starts_BS: The column in which the document of each token starts; None if tokens attend
            across documents.
        ended_BT: Whether each new token ends a document; None if tokens attend across documents.
    """

    cached: int
    positions_BT: Tensor
    padding_BTS: Tensor
    starts_BS: Tensor | None = None
    ended_BT: Tensor | None = None


@dataclass(frozen=True)
class PaddedCall(Call):
    """The arguments of attention for texts that may be padded.

    Attributes:
        padding_BTS: Whether key s is padding that query t must not see.
    """

    padding_BTS: Tensor = field(kw_only=True)

    def hidden(self, distance_TS: Tensor) -> Tensor:
        return super().hidden(distance_TS) | self.padding_BTS[:, None]

    def positions(self) -> Tensor:
        """Return the position of each query in its document, [B, T]. Padding does not count."""
        positions_BT = super().positions()
        if self.starts_BS is None:
            return positions_BT
        row_T = torch.arange(self.query_offset, self.end, device=positions_BT.device)
        return positions_BT.minimum(row_T - self.starts_BS[:, self.query_offset : self.end])


def norm_of(config: KerpleConfig, dim: int, heads: int = 1) -> Norm:
    """Build a normalisation layer of the kind `config.norm` for vectors of size `dim`."""
    return Norm(config.norm, dim, config.norm_eps, heads)


class Attention(nn.Module):
    """Causal self-attention of layer `index`, [B, T, D] to [B, T, D]."""

    def __init__(self, config: KerpleConfig, index: int, pos: PositionalEmbedding, columns: slice):
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.head_size or hidden // heads
        self.group, inner = heads // key_heads, heads * self.size
        self.index, self.pos, self.columns = index, pos, columns
        self.rotary = {"rotary_ndims": config.rotary_ndims, "base": config.rotary_base}
        self.window = config.windows[index] if config.windows else None
        widths = inner + 2 * key_heads * self.size
        self.query_key_value = nn.Linear(hidden, widths, bias=bias or config.qkv_bias)
        self.joined, by_head = config.qk_norm_kind == "joined", config.qk_norm_kind == "by_head"
        self.qk_layernorm = self.query_norm = self.key_norm = None
        if config.qk_norm and by_head:
            self.qk_layernorm = norm_of(config, self.size, heads)
        elif config.qk_norm:
            self.query_norm = norm_of(config, inner if self.joined else self.size)
            self.key_norm = norm_of(config, key_heads * self.size if self.joined else self.size)
        self.dense = nn.Linear(inner, hidden, bias=bias)
        self.gate = nn.Linear(hidden, heads) if pos.has("gate") else None
        self.output_gate = nn.Linear(hidden, inner, bias=bias) if config.output_gate else None

    def forward(
        self, x_BTD: Tensor, theta_HN: Tensor, at: Columns, cache: DynamicCache | None
    ) -> Tensor:
        theta_HN = theta_HN[:, self.columns]
        qkv_BTW = self.query_key_value(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            norms = (self.query_norm, self.key_norm)
            qkv_BTW = normed_heads(qkv_BTW, self.group, self.size, norms, joined=self.joined)
        qkv_BKTW = by_key_heads(qkv_BTW, self.group, self.size, self.qk_layernorm)
        q_BHTE, k_BKTE, v_BKSE = divide_heads(qkv_BKTW, self.size)
        group = q_BHTE.shape[1] // k_BKTE.shape[1]
        q_BHTE, k_BKTE = self.pos.rotate(
            q_BHTE, k_BKTE, positions_BT=at.positions_BT, **self.rotary
        )
        # Gates and ends of documents are cached as further numbers of each key.
        numbers = [k_BKTE]
        if self.gate is not None:
            numbers.append(self.gate(x_BTD).unflatten(-1, (-1, group)).transpose(1, 2))
        if at.ended_BT is not None:
            ended_BKT1 = at.ended_BT[:, None, :, None].expand(-1, k_BKTE.shape[1], -1, 1)
            numbers.append(ended_BKT1.to(k_BKTE.dtype))
        k_BKSE = torch.cat(numbers, dim=-1)
        if cache is not None:
            k_BKSE, v_BKSE = cache.update(k_BKSE, v_BKSE, self.index)
        decay_BHS = None
        if self.gate is not None:
            gates_BKSG = k_BKSE[..., self.size : self.size + group]
            decay_BHS = self.pos.decay(gates_BKSG.transpose(2, 3).flatten(1, 2))
        call = PaddedCall(
            q_BHTE, k_BKSE[..., : self.size], v_BKSE, self.pos, theta_HN,
            scale=self.size**-0.5, query_offset=at.cached, decay_BHS=decay_BHS, window=self.window,
            starts_BS=at.starts_BS, positions_BT=at.positions_BT, padding_BTS=at.padding_BTS,
        )  # fmt: skip
        out_BHTE = eager(lowered(call, grouped=False))
        out_BTD = out_BHTE.transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            out_BTD = out_BTD * self.output_gate(x_BTD).sigmoid()
        return self.dense(out_BTD)


class MLP(nn.Module):
    """The feed-forward layers of a block, [B, T, D] to [B, T, D]."""

    def __init__(self, config: KerpleConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation, self.tanh_gelu = config.activation, config.tanh_gelu
        halves = 2 if config.activation in GATES else 1
        self.dense_h_to_4h = nn.Linear(hidden, halves * inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = self.dense_h_to_4h(x_BTD)
        x = activate(x, self.activation, tanh=self.tanh_gelu)
        return self.dense_4h_to_h(x)


class Block(nn.Module):
    """One transformer block, [B, T, D] to [B, T, D]."""

    def __init__(self, config: KerpleConfig, index: int, pos: PositionalEmbedding, columns: slice):
        super().__init__()
        self.gpt_j_residual = config.gpt_j_residual
        hidden, outputs = config.hidden_size, config.output_norms
        self.input_layernorm = None if outputs else norm_of(config, hidden)
        self.attention = Attention(config, index, pos, columns)
        self.post_attention_layernorm = None if config.gpt_j_tied else norm_of(config, hidden)
        self.mlp = MLP(config)
        self.post_mlp_layernorm = norm_of(config, hidden) if outputs else None

    def forward(
        self, x_BTD: Tensor, theta_HN: Tensor, at: Columns, cache: DynamicCache | None
    ) -> Tensor:
        second = self.post_attention_layernorm
        normed_BTD = x_BTD if self.input_layernorm is None else self.input_layernorm(x_BTD)
        attention_BTD = self.attention(normed_BTD, theta_HN, at, cache)
        if self.gpt_j_residual:
            mlp_BTD = self.mlp(normed_BTD if second is None else second(x_BTD))
            return x_BTD + (attention_BTD + mlp_BTD)
        assert second is not None
        if self.post_mlp_layernorm is not None:
            x_BTD = x_BTD + second(attention_BTD)
            return x_BTD + self.post_mlp_layernorm(self.mlp(x_BTD))
        x_BTD = x_BTD + attention_BTD
        return x_BTD + self.mlp(second(x_BTD))
