"""Define the configuration and the layers of an exported model (see `modeling_kerple`).

The names of weights are those of `megatron.model.GPT`, and the formulas are those of the attention
backend `eager`. Dropout is left out.

Legend: B texts, T new tokens, S all tokens (cached ones and new ones), D hidden size, H heads, K
key heads, E head size, G query heads per key head, N columns of theta, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from megatron.positional import PositionalEmbedding

GATES = {
    "geglu": "gelu",
    "swiglu": "swish",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "identity",
}
"""Maps an activation with two halves, value and gate, to the function of the gate."""


class KerpleConfig(PretrainedConfig):
    """The content of config.json.

    Args:
        norm: `layernorm`, `rmsnorm` (epsilon outside the root), `fused_rmsnorm` (epsilon inside the
            root) or `scalenorm`.
        intermediate_size: The inner width of the MLP.
        pos_emb: The positional embedding of each layer, or one name for all layers.
        pos_emb_options: Maps names of `pos_emb` to their options.
        theta_per_layer: Whether each layer has its own parameters of the positional embedding.
        distance_scale: The factor on all query-key distances.
        windows: The largest distance of a visible key (or None) in each layer. None: any distance.
        document_end: The id of the token that ends a document, if tokens attend only to their own
            document.
        restart_positions: Whether position 0 is the first token of each document.
        position_offset: The number that is added to positions in a trained position table.
    """

    model_type = "kerple"

    def __init__(
        self, vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=64, max_position_embeddings=64, norm="layernorm",
        norm_eps=1e-5, qk_norm=False, activation="gelu", tanh_gelu=False, attention_bias=True,
        mlp_bias=True, gpt_j_residual=False, rotary_ndims=16, rotary_base=10000.0, pos_emb="none",
        pos_emb_options=None, theta_per_layer=False, distance_scale=1.0, windows=None,
        document_end=None, restart_positions=False, position_offset=0, use_cache=True, **kwargs,
    ):  # fmt: skip
        own = dict(locals())
        for name in ("self", "kwargs", "__class__"):
            own.pop(name, None)
        super().__init__(**kwargs)
        for name, value in own.items():
            setattr(self, name, value)


@dataclass
class Columns:
    """What all layers need to know about the S columns of a padded batch.

    Attributes:
        distance_TS: The number of columns from each key to each query.
        hidden_BTS: Whether a query does not see a key, without regard to windows.
        positions_BT: The position of each new token.
        ended_BT: Whether each new token ends a document; None unless documents are separate.
    """

    distance_TS: Tensor
    hidden_BTS: Tensor
    positions_BT: Tensor
    ended_BT: Tensor | None = None


class Norm(nn.Module):
    """A norm of vectors [..., D], or of several heads [..., heads, D] with their own weights."""

    def __init__(self, config: KerpleConfig, dim: int, heads: int = 1):
        super().__init__()
        self.kind, self.eps, self.dim = config.norm, config.norm_eps, dim
        if self.kind == "scalenorm":
            self.g = nn.Parameter(torch.ones(1))
        elif self.kind == "layernorm":
            self.weight = nn.Parameter(torch.ones(heads * dim))
            self.bias = nn.Parameter(torch.zeros(heads * dim))
        else:
            self.scale = nn.Parameter(torch.ones(heads * dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layernorm":
            if len(self.weight) == self.dim:
                return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)
            unit = F.layer_norm(x, (self.dim,), eps=self.eps)
            return unit * self.weight.view(-1, self.dim) + self.bias.view(-1, self.dim)
        if self.kind == "fused_rmsnorm":
            return F.rms_norm(x, (self.dim,), eps=self.eps) * self.scale.view(-1, self.dim)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        length = wide.norm(dim=-1, keepdim=True)
        if self.kind == "scalenorm":
            return (wide / length.clamp(min=self.eps)).to(x.dtype) * self.g
        unit = (wide / (length * self.dim**-0.5 + self.eps)).to(x.dtype)
        return unit * self.scale.view(-1, self.dim)


class Attention(nn.Module):
    """Causal self-attention of layer `index`, [B, T, D] to [B, T, D]."""

    def __init__(self, config: KerpleConfig, index: int, pos: PositionalEmbedding, columns: slice):
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.size = hidden // config.num_attention_heads
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.index, self.pos, self.columns = index, pos, columns
        self.rotary = {"rotary_ndims": config.rotary_ndims, "base": config.rotary_base}
        self.window = config.windows[index] if config.windows else None
        widths = hidden + 2 * hidden // self.group
        self.query_key_value = nn.Linear(hidden, widths, bias=bias)
        heads = config.num_attention_heads
        self.qk_layernorm = Norm(config, self.size, heads) if config.qk_norm else None
        self.dense = nn.Linear(hidden, hidden, bias=bias)
        self.gate = nn.Linear(hidden, heads) if pos.has("gate") else None

    def forward(
        self, x_BTD: Tensor, theta_HN: Tensor, at: Columns, cache: DynamicCache | None
    ) -> Tensor:
        theta_HN = theta_HN[:, self.columns]
        q_BHTE, k_BKTE, v_BKTE = self._queries_keys_values(x_BTD)
        group = q_BHTE.shape[1] // k_BKTE.shape[1]
        q_BHTE, k_BKTE = self.pos.rotate(
            q_BHTE, k_BKTE, positions_BT=at.positions_BT, **self.rotary
        )
        if self.pos.has("temperature"):
            t_HBT = self.pos.temperature(theta_HN, at.positions_BT)
            q_BHTE = (q_BHTE * t_HBT.transpose(0, 1)[..., None]).to(q_BHTE.dtype)
        # Gates and ends of documents are cached as further numbers of each key.
        numbers = [k_BKTE]
        if self.gate is not None:
            numbers.append(self.gate(x_BTD).unflatten(-1, (-1, group)).transpose(1, 2))
        if at.ended_BT is not None:
            ended_BKT1 = at.ended_BT[:, None, :, None].expand(-1, k_BKTE.shape[1], -1, 1)
            numbers.append(ended_BKT1.to(k_BKTE.dtype))
        k_BKSE, v_BKSE = torch.cat(numbers, dim=-1), v_BKTE
        if cache is not None:
            k_BKSE, v_BKSE = cache.update(k_BKSE, v_BKSE, self.index)
        gates_BKSG = k_BKSE[..., self.size : self.size + group]
        k_BKSE = k_BKSE[..., : self.size]
        k_BHSE, v_BHSE = (each.repeat_interleave(group, dim=1) for each in (k_BKSE, v_BKSE))
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        scores_BHTS = self.size**-0.5 * (q_BHTE.to(wide) @ k_BHSE.to(wide).mT)
        if self.gate is not None:
            c_BHS = self.pos.decay(gates_BKSG.transpose(2, 3).flatten(1, 2))
            new = x_BTD.shape[1]
            lost_BHTS = c_BHS[:, :, None] - c_BHS[:, :, -new:, None]
        else:
            lost_BHTS = None
        probs_BHTS = self._probabilities(scores_BHTS, lost_BHTS, theta_HN, at)
        out_BHTE = (probs_BHTS @ v_BHSE.to(wide)).to(x_BTD.dtype)
        return self.dense(out_BHTE.transpose(1, 2).flatten(2))

    def _probabilities(
        self, scores_BHTS: Tensor, lost_BHTS: Tensor | None, theta_HN: Tensor, at: Columns
    ) -> Tensor:
        """Return the softmax of the scaled products, changed by the positional embedding."""
        dtype, hidden_BTS = scores_BHTS.dtype, at.hidden_BTS
        kernel, kernel_HN = self.pos.kernel_part(theta_HN)
        if kernel.has("distance"):
            kernel_HN = theta_HN[:, :0] if kernel_HN is None else kernel_HN
            d_1TS = at.distance_TS.clamp(min=0)[None]
            weight_HBTS = kernel.weight(kernel_HN, d_1TS)
            bias_HBTS = kernel.bias_at(kernel_HN, d_1TS, at.positions_BT[:, :, None])
            if weight_HBTS is not None:
                scores_BHTS = scores_BHTS * weight_HBTS.transpose(0, 1).to(dtype)
            if bias_HBTS is not None:
                scores_BHTS = scores_BHTS + bias_HBTS.transpose(0, 1).to(dtype)
        if lost_BHTS is not None:
            scores_BHTS = scores_BHTS - lost_BHTS.to(dtype)
        if self.window is not None:
            hidden_BTS = hidden_BTS | (at.distance_TS > self.window)
        scores_BHTS = scores_BHTS.masked_fill(hidden_BTS[:, None], -torch.inf)
        if self.pos.has("sink"):
            null_H11 = self.pos.sink(theta_HN).to(dtype)[:, None, None]
            null_BHT1 = null_H11.expand(*scores_BHTS.shape[:3], 1)
            scores_BHTS = torch.cat((scores_BHTS, null_BHT1), dim=-1)
        return scores_BHTS.softmax(dim=-1)[..., : at.distance_TS.shape[1]]

    def _queries_keys_values(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, T, E], k and v [B, K, T, E]; K is H with a norm of queries and keys."""
        qkv = self.query_key_value(x_BTD).unflatten(-1, (-1, self.group + 2, self.size))
        q, k, v = qkv.split([self.group, 1, 1], dim=3)  # [B, T, K, G or 1, E]
        if self.qk_layernorm is not None:
            k, v = k.expand_as(q), v.expand_as(q)
        q, k, v = (each.flatten(2, 3) for each in (q, k, v))
        if self.qk_layernorm is not None:
            q, k = self.qk_layernorm(q), self.qk_layernorm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


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
        if self.activation in GATES:
            value, gate = x.chunk(2, dim=-1)
            return self.dense_4h_to_h(activate(gate, GATES[self.activation], False) * value)
        return self.dense_4h_to_h(activate(x, self.activation, self.tanh_gelu))


def activate(x: Tensor, name: str, tanh_gelu: bool) -> Tensor:
    """Apply the activation `name`. `tanh_gelu` selects the tanh approximation of gelu."""
    if name == "gelu" and tanh_gelu:
        if x.dtype == torch.float64:  # torch's constant differs in the tenth digit
            return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
        return F.gelu(x, approximate="tanh")
    functions = {"sigmoid": torch.sigmoid, "swish": F.silu, "identity": lambda x: x}
    return functions[name](x) if name in functions else getattr(F, name)(x)


class Block(nn.Module):
    """One transformer block, [B, T, D] to [B, T, D]."""

    def __init__(self, config: KerpleConfig, index: int, pos: PositionalEmbedding, columns: slice):
        super().__init__()
        self.gpt_j_residual = config.gpt_j_residual
        self.input_layernorm = Norm(config, config.hidden_size)
        self.attention = Attention(config, index, pos, columns)
        self.post_attention_layernorm = Norm(config, config.hidden_size)
        self.mlp = MLP(config)

    def forward(
        self, x_BTD: Tensor, theta_HN: Tensor, at: Columns, cache: DynamicCache | None
    ) -> Tensor:
        attention_BTD = self.attention(self.input_layernorm(x_BTD), theta_HN, at, cache)
        if self.gpt_j_residual:
            return x_BTD + (attention_BTD + self.mlp(self.post_attention_layernorm(x_BTD)))
        x_BTD = x_BTD + attention_BTD
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
