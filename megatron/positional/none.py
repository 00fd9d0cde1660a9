"""Define the embedding without positional information. Only the causal mask uses positions.

Haviv et al. 2022 (arXiv 2203.16634) find that causal models learn positions from the mask alone.
"""

from megatron.positional.base import PositionalEmbedding


class NoPosition(PositionalEmbedding):
    """Embedding without any effect."""
