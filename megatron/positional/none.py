"""No positional information except the causal mask.

Haviv et al. 2022 (arXiv 2203.16634) find that causal models learn positions from the mask alone.
"""

from __future__ import annotations

from megatron.positional.base import PositionalEmbedding


class NoPosition(PositionalEmbedding):
    """b = 0, w = 1."""

    kind = "none"
