"""Define learned position vectors: row t of a trained table is added to the token at position t.

Gehring et al. 2017 (arXiv 1705.03122); also used in GPT-2. The table [positions, hidden size] is a
parameter of the model and is initialised like the model's other weights. The table has
`max_position_embeddings` rows, so the model cannot process longer sequences.
"""

from megatron.positional.base import PositionalEmbedding


class Learned(PositionalEmbedding):
    """Learned position vectors, which the model adds to the token embeddings."""

    kind = "input"

    @property
    def learnable(self) -> bool:
        """True, because training changes the position vectors."""
        return True
