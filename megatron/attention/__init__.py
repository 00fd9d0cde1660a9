"""Compute causal attention with a learnable distance kernel, by one of several backends.

A distance kernel is a bias that is added to the attention scores, or a factor that multiplies them.
It depends only on the query-key distance. All backends have the same signature. `eager` is the
specification, and every other backend is tested against `eager`. `choose` selects a backend once at
start-up. `attend` selects a backend for a single call. `score_mod_of` converts an embedding to a
`score_mod` function for torch's flex_attention. `cache_launches` reduces the CPU time that the
fused backend needs to launch its Triton kernels.
"""

from megatron.attention.call import Call, starts_from_ids
from megatron.attention.choice import AttentionError, AttentionFn, choose
from megatron.attention.direct_call import attend
from megatron.attention.flex import score_mod_of
from megatron.attention.fused import cache_launches

__all__ = [
    "AttentionError",
    "AttentionFn",
    "Call",
    "attend",
    "cache_launches",
    "choose",
    "score_mod_of",
    "starts_from_ids",
]
