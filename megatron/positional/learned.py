"""Learned position vectors: the model adds row t of a trained table to the token at position t.

Gehring et al. 2017 (arXiv 1705.03122), GPT-2. The table [positions, hidden size] belongs to the
model, which initialises it like its other weights. It has `max_position_embeddings` rows, so the
model cannot be used on longer sequences.
"""

from __future__ import annotations

from megatron.positional.base import PositionalEmbedding


class Learned(PositionalEmbedding):
    """It computes nothing: a model adds a trained table for `kind` input with `learnable`."""

    kind = "input"
    learnable = True
