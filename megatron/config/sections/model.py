"""Define the config section of the model: sizes, activation, positional embedding and so on."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from megatron.config.choices import Activation, Init, Norm, PositionalName, Width, choice
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
from megatron.config.mlp_width import GATED, inner_width
from megatron.config.sections.base import DERIVED, Section
from megatron.config.sections.rope import RopeScaling
from megatron.config.theta_fields import ThetaInit


class ModelConfig(Section):
    num_layers: Positive  # number of transformer blocks
    hidden_size: Positive  # width of the hidden states
    num_attention_heads: Positive  # number of query heads
    # Hugging Face's name: size of a head; default: hidden_size / num_attention_heads
    head_dim: Positive = DERIVED
    # number of key and value heads, for grouped queries; default: num_attention_heads
    num_kv_heads: Positive = DERIVED
    seq_length: Positive  # tokens of a sequence in training
    seq_length_val: Positive = DERIVED  # tokens of a sequence in validation; default: seq_length
    # rows of the table of `learned`; with `rotary` or `sinusoidal`, the longest text of lm_eval and
    # exports; default: seq_length
    max_position_embeddings: Positive = DERIVED
    # the positional embedding: a name, names joined by ` + `, or names per layer
    pos_emb: PositionalName = "learned"
    # arguments of the embedding's class, such as {scale: 1.0} for rpe
    pos_emb_options: Frozen = Field(default_factory=FrozenDict)
    # not in GPT-NeoX: start values of theta, the kernel's parameters
    theta_init: ThetaInit = Field(default_factory=FrozenDict)
    # not in GPT-NeoX: each layer has its own theta; false: equal layers share it
    theta_per_layer: Flag = False
    sliding_window_width: Width = None  # the largest distance of a key, or distances per layer
    reset_attention_mask: Flag = False  # Megatron's name: a token sees only its own document
    reset_position_ids: Flag = False  # Megatron's name: positions restart at each document
    # not in GPT-NeoX: in training, a sequence's positions are a random subset of so many; 0: off
    random_positions: Count = 0
    # the fraction of a head's dimensions that rotate
    rotary_pct: Annotated[float, BeforeValidator(number(0, 1, write="e.g. 0.25"))] = 1.0
    rotary_emb_base: PositiveNumber = 10000.0  # base of the rotary frequencies
    # Hugging Face's name: scaled rotary angles for longer sequences
    rope_scaling: RopeScaling = Field(default_factory=FrozenDict)
    rpe_num_buckets: Positive = 32  # number of T5's buckets of distances
    rpe_max_distance: Positive = 128  # all distances from here on are in T5's last bucket
    opt_pos_emb_offset: Count = 0  # number of the first position of `learned`, as in OPT
    norm: Norm = "layernorm"  # kind of the model's norms
    layernorm_epsilon: Epsilon = 1e-5  # epsilon of `layernorm`
    rms_norm_epsilon: Epsilon = 1e-8  # epsilon of `rmsnorm`
    scalenorm_epsilon: Epsilon = 1e-8  # epsilon of `scalenorm`
    layernorm_fusion: Flag = False  # use apex's kernel where apex is installed
    rmsnorm_fusion: Flag = False  # the same; as in GPT-NeoX, epsilon is then inside the root
    use_qk_layernorm: Flag = False  # apply the norm to each head's queries and keys
    # not in GPT-NeoX: by_head has weights for each head; shared (Qwen3) has one vector for all
    # queries and one for all keys; joined (OLMo 2) is a norm over all heads at once
    qk_layernorm_kind: Annotated[str, choice("by_head shared joined")] = "by_head"
    # not in GPT-NeoX: norms of the outputs of attention and MLP, not of their inputs (OLMo 2)
    output_norms: Flag = False
    # Megatron's name: multiply attention's output by a sigmoid gate of the block's input
    attention_output_gate: Flag = False
    # give the output layer weights of its own; false: the token embedding's
    no_weight_tying: Flag = False
    output_layer_bias: Flag = False  # not in GPT-NeoX: the output layer has a bias (Phi, GPT-J)
    gpt_j_residual: Flag = False  # attention and MLP read the same input, as in GPT-J
    gpt_j_tied: Flag = False  # with gpt_j_residual: attention and MLP also share one norm
    activation: Activation = "gelu"  # activation of the MLP
    # the inner width of the MLP, or three times it with a gated activation; default: 4 hidden_size,
    # geglu: 8 hidden_size, the published code's width
    intermediate_size: Positive = DERIVED
    mlp_multiple_of: Positive = 1  # the inner width is rounded up to a multiple of this
    use_bias_in_attn_linear: Flag = True  # whether the linear layers of attention have biases
    # Megatron's name: queries, keys and values have biases even if use_bias_in_attn_linear is false
    add_qkv_bias: Flag = False
    use_bias_in_mlp: Flag = True  # whether the linear layers of the MLP have biases
    bias_gelu_fusion: Flag = False  # true: tanh approximation of gelu, as in the published code
    init_method: Init = "normal"  # distribution of initial weights
    # the same, for the layers that write into the residual stream
    output_layer_init_method: Init = "scaled_normal"
    # standard deviation of `normal`; `scaled_normal` divides it
    init_method_std: PositiveNumber = 0.02
    # dropout of attention weights; gpt-neox's default, published code: 0.1
    attention_dropout: Probability = 0.0
    # dropout of hidden states; gpt-neox's default, published code: 0.1
    hidden_dropout: Probability = 0.0
    make_vocab_size_divisible_by: Positive = 128  # the vocabulary is padded to a multiple of this
    # not in GPT-NeoX: how attention is computed
    attention_backend: Annotated[str, choice("auto fused blocked flex sdpa eager")] = "auto"
    # not in GPT-NeoX: round 16-bit numbers as the published code does
    published_numerics: Flag = False
    # recompute each block in the backward pass, to save memory
    checkpoint_activations: Flag = False
    # published code: row; both compute the same function
    output_layer_parallelism: Annotated[str, choice("row column")] = "column"

    @property
    def inner_width(self) -> int:
        """The inner width of each MLP."""
        return inner_width(self.activation, self.intermediate_size, self.mlp_multiple_of)

    @property
    def block_parameters(self) -> int:
        """The approximate number of parameters in all blocks. Only matrices are counted."""
        matrices = 3 if self.activation in GATED else 2
        width = self.hidden_size
        return self.num_layers * width * (4 * width + matrices * self.inner_width)
