"""Compute fused causal attention with a learnable distance kernel, in Triton.

A distance kernel is a bias or a factor that depends only on the query-key distance. Other packages
call `forward` and `backward` of the module `launch`. `codegen` translates the expression of a
distance kernel into device functions, which the Triton kernels take as compile-time constants.
`lowering` rewrites the expression for it, in terms of the functions that a GPU has.
`terms` has what the Triton kernels do for documents, windows, sinks and decay.
`tabulated` has device functions for distance kernels that are given by a table of values.
`tile_sizes` lists the tile sizes.
"""
