"""Define the configuration and the layers of an exported model (see `modeling_kerple`).

The weights have the same names as in `megatron.model.GPT`. The formulas of norms, activations,
heads and attention are also the same. Dropout is left out.

Legend: B texts, T new tokens, S all tokens (cached ones and new ones), D hidden size, H heads, K
key heads, E head size, G query heads per key head, V padded vocabulary, N parameters per head of
the positional embedding (theta).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from megatron.hub.columns import Columns
from megatron.hub.padded_call import PaddedCall, attend_as, probabilities
from megatron.model.activations import GATES, activate
from megatron.model.heads import by_key_heads, divide_heads, normed_heads
from megatron.model.norm import Norm
from megatron.positional.base import PositionalEmbedding
from megatron.positional.theta_bounds import within_bounds


class KerpleConfig(PretrainedConfig):
    """The configuration of an exported model, which its config.json stores.

    Args:
        norm: `layernorm`, `rmsnorm`, `fused_rmsnorm` or `scalenorm`. `rmsnorm` adds its epsilon
            outside the square root, and `fused_rmsnorm` inside.
        intermediate_size: The inner width of the MLP.
        head_size: The number of features of a head. None means hidden_size / num_attention_heads.
        qk_norm_kind: How queries and keys are normalised. With `by_head`, each head has its own
            weights. With `shared`, all heads share the weights. With `joined`, all heads are
            normalised as one vector.
        output_norms: Whether norms are applied to the outputs of attention and MLP, not to their
            inputs.
        gpt_j_tied: Whether attention and MLP share one norm.
        qkv_bias: Whether queries, keys and values have a bias even without `attention_bias`.
        output_bias: Whether the output layer has a bias.
        output_gate: Whether the output of attention is multiplied by a sigmoid gate, which is
            computed from the input of attention.
        pos_emb: The name of each layer's positional embedding, or one name for all layers.
        pos_emb_options: Maps the name of a positional embedding to its options.
        theta_per_layer: Whether each layer has its own parameters of the positional embedding.
        distance_scale: A number that multiplies all query-key distances.
        windows: For each layer, the largest distance at which a query sees a key. None means that
            there is no limit.
        document_end: The id of the end-of-document token, if tokens attend only to their own
            document. Otherwise None.
        restart_positions: Whether positions restart at 0 with each document.
        position_offset: The index of the learned vector for position 0.
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
        own = {k: v for k, v in dict(locals()).items() if k not in ("self", "kwargs", "__class__")}
        super().__init__(**kwargs)
        for name, value in own.items():
            setattr(self, name, value)

    @property
    def attention(self) -> str:
        """The name of the attention implementation."""
        return str(getattr(self, "_attn_implementation"))  # noqa: B009


def norm_of(config: KerpleConfig, dim: int, heads: int = 1) -> Norm:
    """Build a normalisation layer for vectors of size `dim`."""
    return Norm(config.norm, dim, config.norm_eps, heads)


class Theta(nn.Module):
    """The parameters of the positional embedding [heads, parameters], in at least fp32."""

    _no_split_modules = ["Theta"]  # FSDP then shards it alone: its weights have one dtype

    def __init__(self, pos: PositionalEmbedding, heads: int):
        super().__init__()
        self.pos = pos
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        kind = nn.Parameter if any(p.trained for p in pos.parameters) else nn.Buffer
        self.theta = kind(pos.initial_theta(heads).to(wide))
        _LIVE.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        _LIVE.add(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Theta:
        def widely(x: Tensor) -> Tensor:
            found = fn(x)
            wide = torch.promote_types(found.dtype, torch.float32)
            return found.to(wide) if x.is_meta else x.to(found.device, wide)

        return super()._apply(widely, recurse)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        if not self.theta.is_inference():
            self.project()
        super()._save_to_state_dict(*arguments)

    @torch.no_grad()
    # Runs after each step of a `torch.optim.Optimizer`, or in the next forward pass.
    def project(self) -> None:
        """Project the parameters onto their bounds. In evaluation mode, do nothing."""
        if self.training and self.theta.dim() == 2 and not self.theta.is_meta:
            self.theta.data.copy_(within_bounds(self._columns(), self.pos.parameters))

    def _columns(self) -> Tensor:
        columns = []
        for own_H, p in zip(self.theta.clone().unbind(1), self.pos.parameters, strict=True):
            column_H = own_H[:1].expand_as(own_H) if p.shared else own_H
            columns.append(column_H if p.trained else column_H.detach())
        return torch.stack(columns, dim=1)

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Return the parameters in `dtype`, or in their own dtype if it is wider."""
        if torch.is_grad_enabled():
            self.project()
        theta_HN = self._columns()  # a copy, which the next projection leaves as it is
        return theta_HN.to(torch.promote_types(theta_HN.dtype, dtype))


_LIVE: WeakSet[Theta] = WeakSet()


def _project_all(optimizer: Any, *_: Any) -> None:
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for theta in (each for each in _LIVE if id(each.theta) in held):
        theta.project()


register_optimizer_step_post_hook(_project_all)


class Embedding(nn.Module):
    """The token embedding, and the learned position vectors if the model has any."""

    def __init__(self, config: KerpleConfig, pos: PositionalEmbedding):
        super().__init__()
        self.pos, self.offset = pos, config.position_offset
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings: nn.Embedding | None = None
        if any(term.kind == "input" and term.learnable for term in pos.terms):
            rows = config.max_position_embeddings
            self.position_embeddings = nn.Embedding(rows, config.hidden_size)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Add position vectors to token vectors."""
        if self.position_embeddings is not None:
            rows = self.position_embeddings.num_embeddings - self.offset
            if not torch.compiler.is_compiling() and int(positions_BT.max()) >= rows:
                raise ValueError(f"the model has vectors for {rows} positions, so no more tokens")
            return x_BTD + self.position_embeddings(positions_BT + self.offset)
        if self.pos.has("input"):
            table_BTD = self.pos.table(positions_BT, x_BTD.shape[-1], x_BTD.dtype)
            return x_BTD + table_BTD.to(x_BTD.dtype)
        return x_BTD


class Attention(nn.Module):
    """The causal self-attention of a block. Input and output are [batch, tokens, features]."""

    def __init__(self, config: KerpleConfig, index: int, pos: PositionalEmbedding, columns: slice):
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.config, self.index, self.pos, self.columns = config, index, pos, columns
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.head_size or hidden // heads
        self.group, inner = heads // key_heads, heads * self.size
        self.rotary = {"rotary_ndims": config.rotary_ndims, "base": config.rotary_base}
        self.window = config.windows[index] if config.windows else None
        widths = inner + 2 * key_heads * self.size
        self.query_key_value = nn.Linear(hidden, widths, bias=bias or config.qkv_bias)
        self.joined, by_head = config.qk_norm_kind == "joined", config.qk_norm_kind == "by_head"
        # transformers reads this; a norm of its own for each query head needs a key for each, too
        self.num_key_value_groups = 1 if config.qk_norm and by_head else self.group
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
        self, x_BTD: Tensor, theta_HN: Tensor, at: Columns, cache: Cache | None, attentions: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the attention probabilities if `attentions` is true, else None."""
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
        k_BKSE = torch.cat(numbers, dim=-1) if len(numbers) > 1 else k_BKTE
        if cache is not None:
            column = {"cache_position": at.columns_T}  # for transformers 4
            k_BKSE, v_BKSE = cache.update(k_BKSE, v_BKSE, self.index, column)
            if at.offset is not None:  # a static cache holds zeros after the new tokens
                end = at.offset + at.columns_T.shape[0]
                k_BKSE, v_BKSE = k_BKSE[:, :, :end], v_BKSE[:, :, :end]
        decay_BHS = None
        if self.gate is not None:
            gates_BKSG = k_BKSE[..., self.size : self.size + group]
            decay_BHS = self.pos.decay(gates_BKSG.transpose(2, 3).flatten(1, 2))
        call = PaddedCall(
            q_BHTE, k_BKSE[..., : self.size], v_BKSE, self.pos, theta_HN[:, self.columns],
            scale=self.size**-0.5, decay_BHS=decay_BHS, window=self.window,
            positions_BT=at.positions_BT, columns_T=at.columns_T, first_BT=at.first_BT,
            vectors=at.vectors, query_offset=at.offset or 0,
        )  # fmt: skip
        out_BHTE = attend_as(self.config.attention, self, call, at.offset)
        out_BTD = out_BHTE.transpose(1, 2).flatten(2).to(x_BTD.dtype)
        if self.output_gate is not None:
            out_BTD = out_BTD * self.output_gate(x_BTD).sigmoid()
        return self.dense(out_BTD), probabilities(call) if attentions else None


class MLP(nn.Module):
    """The feed-forward layers of a block. Input and output are [batch, tokens, features]."""

    def __init__(self, config: KerpleConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation, self.tanh_gelu = config.activation, config.tanh_gelu
        halves = 2 if config.activation in GATES else 1
        self.dense_h_to_4h = nn.Linear(hidden, halves * inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = activate(self.dense_h_to_4h(x_BTD), self.activation, tanh=self.tanh_gelu)
        return self.dense_4h_to_h(x)


class Block(GradientCheckpointingLayer):
    """One transformer block. Input and output are [batch, tokens, features]."""

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
        self,
        x_BTD: Tensor,
        theta_HN: Tensor,
        at: Columns,
        past_key_values: Cache | None = None,
        attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        second = self.post_attention_layernorm
        normed_BTD = x_BTD if self.input_layernorm is None else self.input_layernorm(x_BTD)
        y_BTD, probs = self.attention(normed_BTD, theta_HN, at, past_key_values, attentions)
        if self.gpt_j_residual:
            mlp_BTD = self.mlp(normed_BTD if second is None else second(x_BTD))
            return x_BTD + (y_BTD + mlp_BTD), probs
        assert second is not None
        if self.post_mlp_layernorm is not None:
            x_BTD = x_BTD + second(y_BTD)
            return x_BTD + self.post_mlp_layernorm(self.mlp(x_BTD)), probs
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(second(x_BTD)), probs
