"""Which embeddings the slow tests may pass over."""

from megatron.positional import load, names

ALIKE = frozenset({"alibi_learned", "bam", "gaussian", "gaussian3", "gaussian_mul", "fire"})
"""Embeddings whose formula takes the ways that another's takes through every backend. The contract,
the interpreter and the blocked backend test them once; tests of many cells for each name do not.
FIRE takes long in the interpreter, so `test_attention_fire` and `test_kernels_hidden` have it, with
few hidden units."""

TERMS = frozenset(name for name in names() if load(name).kind in ("temperature", "gate", "sink"))
"""Embeddings that act on attention beside the distance kernel; test_attention_terms tests them."""
PLAIN = tuple(name for name in names() if name not in TERMS)
QUICK = tuple(name for name in PLAIN if name != "fire")
