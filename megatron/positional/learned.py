"""Learned position vectors: the model adds row t of a trained table to the token at position t.

Gehring et al. 2017 (arXiv 1705.03122), GPT-2. The table [positions, hidden size] belongs to the
model, which initialises it like its other weights; it has no row past ``max_position_embeddings``,
so such a model cannot be used on longer sequences.
"""

from __future__ import annotations

from megatron.positional.base import PositionalEmbedding


class Learned(PositionalEmbedding):
    """A mark for the model: ``kind`` input and ``learnable`` ask for the table."""

    kind = "input"
    learnable = True
