"""Fused causal attention with a learnable kernel of distance, in Triton.

Other packages call `launch`: `forward` and `backward` on tensors. `codegen` turns the expression of
a kernel of distance into device functions, which the passes take as compile-time constants.
`tabulated` has such functions for kernels given by their values. `tile_sizes` has the tile sizes.
"""
