"""torch's scaled_dot_product_attention, for the requests that it can serve.

Without a kernel of distance it serves everything. A bias becomes an additive mask [1, H, T, S] in
fp32 (q, k and v then are fp32 too: a mask in bf16 would round the bias). That serves evaluation
only, since the gradient of such a mask is as large as [B, H, T, S]. A multiplicative kernel cannot
be a mask.

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta.

Caution: quadratic memory with a bias, and [T, S] booleans for several queries at an offset.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.attention.backend import Backend, Call, Request, weighted

_sdpa: Any = torch.nn.functional.scaled_dot_product_attention


def sdpa(call: Call) -> Tensor:
    """See `choice.AttentionFn`."""
    q_BHTE, k_BHSE, v_BHSE = call.q_BHTE, call.k_BKSE, call.v_BKSE
    options = {"scale": call.scale, "dropout_p": call.dropout_p}
    if not call.has_kernel and (call.query_offset == 0 or q_BHTE.shape[2] == 1):
        causal = call.query_offset == 0
        return _sdpa(q_BHTE, k_BHSE, v_BHSE, is_causal=causal, **options)
    key_S = torch.arange(k_BHSE.shape[2], device=q_BHTE.device)
    distance_TS = key_S[call.query_offset :, None] - key_S
    if not call.has_kernel:
        return _sdpa(q_BHTE, k_BHSE, v_BHSE, attn_mask=distance_TS >= 0, **options)
    dtype = torch.promote_types(q_BHTE.dtype, torch.float32)
    bias_HTS = call.pos.bias(call.theta.to(dtype), distance_TS.clamp(min=0))
    assert bias_HTS is not None  # `refusal` excludes kernels that only multiply
    mask_1HTS = bias_HTS.masked_fill(distance_TS < 0, -torch.inf)[None]
    inputs = (x.to(dtype) for x in (q_BHTE, k_BHSE, v_BHSE))
    return _sdpa(*inputs, attn_mask=mask_1HTS, **options).to(q_BHTE.dtype)


def refusal(request: Request) -> str | None:
    if weighted(request.pos):
        return f"has no place for {request.pos.name}, which multiplies scores"
    if request.pos.kind == "distance" and request.training:
        return (
            f"would need memory quadratic in the length to train with {request.pos.name} (it "
            "serves embeddings without a kernel of distance, and evaluation)"
        )
    return None


def remark(request: Request) -> str:
    return "with the kernel as a quadratic mask" if request.pos.kind == "distance" else ""


BACKEND = Backend("sdpa", sdpa, refusal, remark)
