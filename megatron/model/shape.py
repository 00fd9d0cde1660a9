"""Define the values from which a model is built: its shape and its plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.attention import AttentionFn
from megatron.model.documents import Documents
from megatron.numerics import WIDE, Numerics
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.sequence import SequenceSplit
from megatron.positional import PositionalEmbedding


@dataclass(frozen=True)
class BlockShape:
    """The values that determine one transformer block.

    Attributes:
        norm: One of `layernorm`, `rmsnorm` and `scalenorm`.
        fused_norm: Whether layernorm and rmsnorm use apex's kernels if apex is installed.
        activation: One of `gelu`, `relu`, `softsign`, `swish` and `mish`. For a gated MLP, one of
            `geglu`, `swiglu`, `reglu`, `glu` and `bilinear`.
        inner_size: The inner width of the MLP. None means 4 * hidden_size. For `geglu`, None means
            int(8/3 * hidden_size), as in KERPLE's published code.
        num_kv_heads: The number of key and value heads. None means one for each query head.
        head_dim: The head size. None means hidden_size / num_heads.
        qk_norm: Whether queries and keys are normalised.
        qk_norm_kind: The kind of weights of the norm of queries and keys. `by_head`: each query
            head has its own weights, and queries and keys use the same weights. `shared`: all heads
            share a weight vector for queries and another for keys. `joined`: the norm treats all
            heads as one vector, with a weight vector for queries and another for keys.
        output_gate: Whether the output of attention is multiplied by a sigmoid gate, which is
            computed from the input of attention.
        attention_bias: Whether the linear layers of attention have a bias.
        qkv_bias: Whether queries, keys and values have a bias even without `attention_bias`.
        mlp_bias: Whether the linear layers of the MLP have a bias.
        gpt_j_tied: Whether attention and MLP share one norm. This requires `gpt_j_residual`.
        output_norms: Whether norms are applied to the outputs of attention and MLP instead of the
            inputs.
        tanh_gelu: Whether to use the tanh approximation of gelu.
        rotary_pct: The fraction of each head's dimensions that a rotary embedding rotates.
        numerics: The rules for rounding, such as the dtype of intermediate results.
    """

    hidden_size: int
    num_heads: int
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    fused_norm: bool = False
    gpt_j_residual: bool = False
    gpt_j_tied: bool = False
    output_norms: bool = False
    activation: str = "gelu"
    tanh_gelu: bool = False
    inner_size: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    qk_norm_kind: str = "by_head"
    output_gate: bool = False
    attention_bias: bool = True
    qkv_bias: bool = False
    mlp_bias: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rotary_pct: float = 1.0
    rotary_base: float = 10000.0
    numerics: Numerics = WIDE

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def group(self) -> int:
        """The number of query heads that share one key head."""
        return self.num_heads // (self.num_kv_heads or self.num_heads)

    @property
    def rotary_ndims(self) -> int:
        """The number of dimensions of each head that a rotary embedding rotates."""
        return int(self.head_size * self.rotary_pct)

    @property
    def mlp_size(self) -> int:
        """The inner width of the MLP. In a gated MLP, value and gate each have this width."""
        if self.inner_size is not None:
            return self.inner_size
        if self.activation == "geglu":
            return int(4 * 2 / 3 * self.hidden_size)
        return 4 * self.hidden_size


@dataclass(frozen=True)
class GPTShape:
    """The values that determine the language model.

    Attributes:
        vocab_size: The padded vocabulary size.
        max_positions: The number of rows of a table of learned positions. With rotary or sinusoidal
            positions, the longest text in lm_eval and in exports.
        tie_weights: Whether the output layer uses the matrix of the token embedding.
        init_method: The name of the method that draws the initial values of most layers.
        output_init_method: The name of the method that draws the initial values of layers that
            write to the residual stream.
        position_offset: The index of the learned position vector of position 0 (2 in OPT).
        checkpoint_activations: Whether to recompute each block in the backward pass.
        output_bias: Whether an untied output layer has a bias.
        row_parallel_output: Whether an untied output layer is row-parallel instead of
            column-parallel.
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
    row_parallel_output: bool = False
    output_bias: bool = False


@dataclass(frozen=True)
class LayerAttention:
    """The properties of attention that may differ from layer to layer.

    Attributes:
        pos: The layer's positional embedding.
        attend: The layer's attention function.
        columns: The slice of the positional embedding's parameters that the layer uses.
        window: The largest distance at which a query sees a key. None means any distance.
    """

    pos: PositionalEmbedding
    attend: AttentionFn
    columns: slice
    window: int | None = None


@dataclass(frozen=True)
class Plan:
    """Everything from which the layers of one model are built.

    Attributes:
        pos: The positional embedding of the model.
        attend: The attention function of all layers, unless `layers` names others.
        seed: The seed of the initial values.
        tp: The tensor-parallel group.
        cp: The context-parallel group.
        theta_init: Start values of the positional embedding's parameters, by name. A start value is
            one number for all heads, or a number for each head.
        theta_frozen: The names of the positional embedding's parameters that training does not
            change.
        layers: The attention of each layer. Empty if all layers have the same attention.
        z_loss: The coefficient of the z-loss, the squared log-sum-exp of the logits.
        documents: How sequences are divided into documents. None if each sequence is one document.
    """

    shape: GPTShape
    pos: PositionalEmbedding
    attend: AttentionFn
    seed: int
    tp: TensorGroup = ALONE
    cp: TensorGroup = ALONE
    theta_init: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)
    theta_frozen: tuple[str, ...] = ()
    layers: tuple[LayerAttention, ...] = ()
    documents: Documents | None = None
    z_loss: float = 0.0

    def layer(self, index: int) -> LayerAttention:
        """Return the properties of attention in layer `index`, counted from 0."""
        if self.layers:
            return self.layers[index]
        return LayerAttention(self.pos, self.attend, slice(None))

    @property
    def attends(self) -> list[AttentionFn]:
        """The attention function of each layer."""
        return [self.layer(index).attend for index in range(self.shape.num_layers)]

    @property
    def split(self) -> SequenceSplit:
        """How the positions of each sequence are split over the ranks."""
        return SequenceSplit(self.tp, self.cp)
