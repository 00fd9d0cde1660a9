"""Causal attention with a learnable distance kernel: one signature, several implementations.

``eager`` is the truth; every other backend is tested against it. ``choose`` looks one up at
start-up, ``attend`` calls one by name.
"""

from megatron.attention.choice import AttentionError, AttentionFn, attend, choose

__all__ = ["AttentionError", "AttentionFn", "attend", "choose"]
