"""Define the config section of the model: sizes, activation, positional embedding and so on."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron.config.choices import (
    Activation,
    AttentionBackend,
    Init,
    Norm,
    PositionalName,
    Side,
    Width,
)
from megatron.config.fields import (
    Count,
    Epsilon,
    Flag,
    Frozen,
    FrozenDict,
    Positive,
    PositiveNumber,
    Probability,
    number,
)
from megatron.config.sections.base import DERIVED, Section
from megatron.config.sections.rope import RopeScaling
from megatron.config.sizes import inner_width
from megatron.config.theta import ThetaInit


class ModelConfig(Section):
    num_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_kv_heads: Positive = DERIVED  # grouped queries; default: num_attention_heads
    seq_length: Positive
    seq_length_val: Positive = DERIVED  # default: seq_length
    max_position_embeddings: Positive = DERIVED  # rows of `learned`; default: seq_length
    pos_emb: PositionalName = "learned"
    pos_emb_options: Frozen = Field(default_factory=FrozenDict)
    theta_init: ThetaInit = Field(default_factory=FrozenDict)  # not in GPT-NeoX: start values
    theta_per_layer: Flag = False  # else layers with the same embedding share theta
    sliding_window_width: Width = None  # the largest distance of a key, or distances per layer
    reset_attention_mask: Flag = False  # Megatron's name: a token sees only its own document
    reset_position_ids: Flag = False  # Megatron's name: positions restart at each document
    rotary_pct: Annotated[float, BeforeValidator(number(0, 1, write="e.g. 0.25"))] = 1.0
    rotary_emb_base: PositiveNumber = 10000.0
    rope_scaling: RopeScaling = Field(default_factory=FrozenDict)  # Hugging Face's name
    rpe_num_buckets: Positive = 32
    rpe_max_distance: Positive = 128
    opt_pos_emb_offset: Count = 0
    norm: Norm = "layernorm"
    layernorm_epsilon: Epsilon = 1e-5
    rms_norm_epsilon: Epsilon = 1e-8
    scalenorm_epsilon: Epsilon = 1e-8
    layernorm_fusion: Flag = False  # apex's kernel where apex is installed
    rmsnorm_fusion: Flag = False  # the same; as in GPT-NeoX, epsilon is then inside the root
    use_qk_layernorm: Flag = False  # the norm of each head's queries and keys
    no_weight_tying: Flag = False
    gpt_j_residual: Flag = False
    activation: Activation = "gelu"
    # The inner width of the MLP, or three times it with a gated activation (see `inner_width`).
    # Default: 4 hidden_size; geglu: 8 hidden_size, the published code's width.
    intermediate_size: Positive = DERIVED
    mlp_multiple_of: Positive = 1  # the inner width is rounded up to a multiple of this
    use_bias_in_attn_linear: Flag = True
    use_bias_in_mlp: Flag = True
    bias_gelu_fusion: Flag = False  # true: tanh approximation of gelu, as in the published code
    init_method: Init = "normal"
    output_layer_init_method: Init = "scaled_normal"
    init_method_std: PositiveNumber = 0.02
    attention_dropout: Probability = 0.0  # gpt-neox; the published code's default is 0.1
    hidden_dropout: Probability = 0.0  # gpt-neox; the published code's default is 0.1
    make_vocab_size_divisible_by: Positive = 128
    attention_backend: AttentionBackend = "auto"
    published_numerics: Flag = False  # not in GPT-NeoX: round 16-bit numbers as the published code
    checkpoint_activations: Flag = False
    output_layer_parallelism: Side = "column"  # published: row; both compute the same function

    @property
    def inner_width(self) -> int:
        """The inner width of the MLP."""
        return inner_width(self.activation, self.intermediate_size, self.mlp_multiple_of)
