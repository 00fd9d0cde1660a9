"""Which embeddings the slow tests may pass over."""

ALIKE = frozenset({"alibi_learned", "gaussian", "gaussian3", "gaussian_mul"})
"""Embeddings whose formula takes the ways that another's takes through every backend. The contract,
the interpreter and the blocked backend test them once; tests of many cells for each name do not."""
