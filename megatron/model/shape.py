"""What fixes the parameters and the formula of a model, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.numerics import WIDE, Numerics


@dataclass(frozen=True)
class BlockShape:
    """One transformer block.

    Attributes:
        norm: `layernorm`, `rmsnorm` or `scalenorm`.
        activation: `gelu`, `geglu`, `relu`, `softsign`, `swish` or `mish`.
        tanh_gelu: use the tanh approximation of gelu.
        rotary_pct: fraction of each head's dimensions that a rotary embedding rotates.
        numerics: how norms, activations, the MLP and attention's output projection round.
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
    def rotary_ndims(self) -> int:
        """Dimensions of each head that a rotary embedding rotates."""
        return int(self.head_size * self.rotary_pct)

    @property
    def mlp_size(self) -> int:
        """Inner width of the MLP: 4 D, or int(8/3 D) for geglu, which has two such halves."""
        if self.activation == "geglu":
            return int(4 * 2 / 3 * self.hidden_size)
        return 4 * self.hidden_size


@dataclass(frozen=True)
class GPTShape:
    """The language model.

    Attributes:
        vocab_size: padded vocabulary size V.
        max_positions: rows of a trained position table (`learned`).
        tie_weights: the output layer uses the matrix of the token embedding.
        init_method, output_init_method: see `megatron.model.init`; the second is for the layers
            that write to the residual stream.
        position_offset: added to every position of a trained table, within its rows (OPT uses 2).
        checkpoint_activations: recompute each block in the backward pass.
        row_parallel_output: shard an untied output layer by its inputs (published: "row"), not by
            tokens. The function is the same.
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
