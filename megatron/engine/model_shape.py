"""Compute the shape of a config's model, such as its widths and its norms.

The module `engine/build.py` combines the shape with the positional embedding and with attention.
"""

from dataclasses import asdict, replace
from typing import Any

import torch

from megatron.config import Config
from megatron.config.choices import terms_of
from megatron.data.tokenizers.base import Tokenizer
from megatron.model import BlockShape, GPTShape
from megatron.model.padded_vocab import padded_vocab_size
from megatron.numerics import WIDE, Numerics, PublishedNumerics

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def numerics_of(config: Config) -> Numerics:
    """Return the rules by which the config's model rounds intermediate results."""
    # By default, norms and positional embeddings convert 16-bit numbers to fp32 before they
    # compute. With `published_numerics`, the model rounds where the released KERPLE code rounds.
    if not config.model.published_numerics:
        return WIDE
    return PublishedNumerics(DTYPES[config.training.precision])


def sums_in(config: Config) -> str | None:
    """Return the type in which processes add gradients; None is the precision of training."""
    p = config.parallel
    return "fp32" if p.fp32_allreduce else p.communication_data_type


def shape_of(config: Config, vocab_size: int) -> GPTShape:
    """Return the shape of the config's model.

    Args:
        vocab_size: The size of the tokenizer's vocabulary, before padding.
    """
    m = config.model
    assert m.max_position_embeddings is not None  # derived when the config is loaded
    eps, fused = {
        "layernorm": (m.layernorm_epsilon, m.layernorm_fusion),
        "rmsnorm": (m.rms_norm_epsilon, m.rmsnorm_fusion),
        "scalenorm": (m.scalenorm_epsilon, False),
    }[m.norm]
    block = BlockShape(
        hidden_size=m.hidden_size,
        num_heads=m.num_attention_heads,
        norm=m.norm,
        norm_eps=eps,
        fused_norm=fused,
        gpt_j_residual=m.gpt_j_residual,
        gpt_j_tied=m.gpt_j_tied,
        output_norms=m.output_norms,
        activation=m.activation,
        tanh_gelu=m.bias_gelu_fusion,
        num_kv_heads=None if m.num_kv_heads == m.num_attention_heads else m.num_kv_heads,
        head_dim=None if m.head_dim * m.num_attention_heads == m.hidden_size else m.head_dim,
        qk_norm=m.use_qk_layernorm,
        qk_norm_kind=m.qk_layernorm_kind,
        output_gate=m.attention_output_gate,
        attention_bias=m.use_bias_in_attn_linear,
        qkv_bias=m.add_qkv_bias,
        mlp_bias=m.use_bias_in_mlp,
        attention_dropout=m.attention_dropout,
        hidden_dropout=m.hidden_dropout,
        rotary_pct=m.rotary_pct,
        rotary_base=m.rotary_emb_base,
        numerics=numerics_of(config),
    )
    if block.mlp_size != m.inner_width:
        block = replace(block, inner_size=m.inner_width)
    return GPTShape(
        num_layers=m.num_layers,
        vocab_size=padded_vocab_size(vocab_size, m.make_vocab_size_divisible_by),
        block=block,
        max_positions=m.max_position_embeddings,
        tie_weights=not m.no_weight_tying,
        init_method=m.init_method,
        output_init_method=m.output_layer_init_method,
        init_std=m.init_method_std,
        position_offset=m.opt_pos_emb_offset,
        checkpoint_activations=m.checkpoint_activations,
        output_bias=m.output_layer_bias,
        row_parallel_output=m.output_layer_parallelism == "row",
    )


def identity_of(
    config: Config, model_shape: GPTShape, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the model's shape, positional embedding and tokenizer as JSON values.

    Two models with equal values can load each other's weights. If `tokenizer` is None, the result
    has no entry for it.
    """
    # The entry `max_positions` is missing if the model has no trained position table.
    shape = asdict(model_shape)
    block = shape.pop("block")
    no_weights = ("checkpoint_activations", "row_parallel_output")
    for name in ("init_method", "output_init_method", "init_std", *no_weights):
        del shape[name]
    for name in ("attention_dropout", "hidden_dropout", "numerics"):
        del block[name]
    block["fused_norm"] &= block["norm"] == "rmsnorm"  # the fused layernorm has the same value
    if "learned" not in terms_of(config.model.pos_emb):
        del shape["max_positions"]  # the longest sequence, of which no weight depends
    named = {"tokenizer": f"{tokenizer.name} {tokenizer.fingerprint()}"} if tokenizer else {}
    return named | {
        "pos_emb": config.model.pos_emb,
        "pos_emb_options": dict(config.model.pos_emb_options),
        "theta_per_layer": config.model.theta_per_layer,
        "rope_scaling": dict(config.model.rope_scaling),
        **shape,
        **block,
    }
