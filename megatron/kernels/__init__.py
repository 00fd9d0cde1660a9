"""Fused causal attention with a learnable kernel of distance, in Triton; no other package has it.

``launch`` is the way in: ``forward`` and ``backward`` on tensors. ``formula`` turns the expression
of a kernel of distance into the device functions that the passes take as compile-time constants,
``table`` has such functions for kernels given by their values. ``blocks`` has the tile sizes.
"""
