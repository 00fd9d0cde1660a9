"""Refuse sizes of the model that do not fit together or that no machine's memory can hold."""

from typing import Any

from megatron.config.choices import terms_of
from megatron.config.mlp_width import inner_width
from megatron.config.rules.relation import Found, relation

MOST_LAYERS = 100_000
MOST_NUMBERS = 10**13
"""A model may have at most this many parameters, and a layer at most this many activations."""


@relation("hidden_size", "num_attention_heads", "head_dim", unset=True)
def _heads(hidden: int, heads: int, size: int | None) -> Found | None:
    if size is None:
        near = max(1, round(hidden / heads)) * heads
        text = f"{hidden} is not a multiple of num_attention_heads {heads} "
        text += f"({hidden} / {heads} = {hidden / heads:.4g})"
        return "hidden_size", f"{text}; write e.g. hidden_size: {near}, or name head_dim"


@relation("gpt_j_tied", "gpt_j_residual", "output_norms")
def _norms(tied: bool, parallel: bool, outputs: bool) -> Found | None:
    if tied and not parallel:
        text = "true without gpt_j_residual: attention and MLP have different inputs"
        return "gpt_j_tied", f"{text}; write gpt_j_residual: true, or leave it out"
    if parallel and outputs:
        text = "true with gpt_j_residual: the sum of both outputs has no norm for each"
        return "output_norms", f"{text}; write gpt_j_residual: false"


@relation("qk_layernorm_kind", "use_qk_layernorm", "norm", "rmsnorm_fusion")
def _qk_norm(kind: str, used: bool, norm: str, fused: bool) -> Found | None:
    if kind != "by_head" and not used:
        text = f"{kind} without use_qk_layernorm: there is no such norm"
        return "qk_layernorm_kind", f"{text}; write use_qk_layernorm: true"
    if kind == "joined" and not (norm == "rmsnorm" and fused):
        text = "joined is built for the fused rmsnorm alone"
        return "qk_layernorm_kind", f"{text}; write norm: rmsnorm and rmsnorm_fusion: true"


@relation("output_layer_bias", "no_weight_tying")
def _output_bias(bias: bool, untied: bool) -> Found | None:
    if bias and not untied:
        text = "true, but the output layer is the token embedding, which has no bias"
        return "output_layer_bias", f"{text}; write no_weight_tying: true"


@relation("activation", "intermediate_size", "mlp_multiple_of")
def _inner_width(activation: str, intermediate: int, multiple: int) -> Found | None:
    if inner_width(activation, intermediate, multiple) == 0:
        text = f"{intermediate} x 2/3 / 2 leaves the MLP no inner width ({activation})"
        return "intermediate_size", f"{text}; write at least 3"


@relation()
def _model_size(
    num_layers: int, hidden_size: int, num_attention_heads: int, head_dim: int,
    intermediate_size: int, make_vocab_size_divisible_by: int, pos_emb: Any,
    max_position_embeddings: int, rpe_num_buckets: int,
) -> Found | None:  # fmt: skip
    if num_layers > MOST_LAYERS:
        return "num_layers", f"{num_layers} is above {MOST_LAYERS:,}; write a smaller number"
    in_all_layers, terms = num_layers * hidden_size, terms_of(pos_emb)
    parameters = {
        "hidden_size": 12 * in_all_layers * hidden_size,
        "head_dim": 4 * in_all_layers * num_attention_heads * head_dim,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by * hidden_size,
        "max_position_embeddings": hidden_size * max_position_embeddings * ("learned" in terms),
        "rpe_num_buckets": rpe_num_buckets * ("rpe" in terms),
        "intermediate_size": in_all_layers * intermediate_size,
    }
    for name, count in parameters.items():
        if count > MOST_NUMBERS:
            text = f"{count:.1e} parameters follow from it, and at most {MOST_NUMBERS:.0e} are"
            return name, f"{text} possible; write a smaller number"


@relation("train_batch_size", "seq_length", "seq_length_val", "hidden_size")
def _activations(batch: int, length: int, length_val: int, hidden: int) -> Found | None:
    for name, tokens in (("seq_length", length), ("seq_length_val", length_val)):
        if max(tokens * hidden, tokens * batch) > MOST_NUMBERS:
            text = f"{tokens} with hidden_size {hidden} and train_batch_size {batch} fits into no"
            return name, f"{text} machine's memory; write smaller sizes"


@relation("attention_dropout", "hidden_dropout")
def _dropout(attention: float, hidden: float) -> Found | None:
    for name, value in (("attention_dropout", attention), ("hidden_dropout", hidden)):
        if value >= 1:
            return name, f"{value} drops every activation; write a probability below 1"


@relation("published_numerics", "norm", "rmsnorm_fusion")
def _published_norm(published: bool, norm: str, fused: bool) -> Found | None:
    if published and norm == "rmsnorm" and fused:
        text = "true with rmsnorm_fusion: the fused norm does not round as the published code"
        return "published_numerics", f"{text}; write rmsnorm_fusion: false"
