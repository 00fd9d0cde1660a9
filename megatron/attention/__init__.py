"""Causal attention with a learnable distance kernel: one signature, several implementations.

`eager` is the specification; every other backend is tested against it. `choose` looks up a backend
at start-up, `attend` looks one up by name and calls it.
"""

from megatron.attention.choice import AttentionError, AttentionFn, attend, choose

__all__ = ["AttentionError", "AttentionFn", "attend", "choose"]
