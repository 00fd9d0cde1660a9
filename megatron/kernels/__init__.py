"""Compute fused causal attention with a learnable distance kernel, in Triton.

A distance kernel is a bias that is added to the attention scores, or a factor that multiplies them.
It depends only on the query-key distance. Other packages call `forward` and `backward` of the
module `launch`. `codegen` translates the expression of a distance kernel into device functions,
which the Triton kernels take as compile-time constants. Before that, `lowering` rewrites the
expression so that it uses only functions that a GPU can compute. `tabulated` has the device
functions for a distance kernel that is given by a table of values. `rows` has code that the Triton
kernels share: the start of a program, and the logits of its query rows. `documents_sink_decay` has
the device functions for documents, windows, sinks and decay. `dropout` has the dropout mask.
`decode` has the Triton kernels for few queries and many keys. `tile_sizes` lists the tile sizes.
`compiled_variants` caches compiled kernels.
"""
