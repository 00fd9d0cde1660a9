"""Compute attention by torch's scaled_dot_product_attention, with or without a bias.

A distance kernel is a bias or a factor that depends only on the query-key distance. Without a
distance kernel, this backend serves every request. A bias becomes an additive mask [1, H, T, S] in
fp32. q, k and v are then converted to fp32, because a bf16 mask would round the bias. With a bias
the backend serves evaluation only, because the gradient of the mask would be [B, H, T, S]. A
factor is refused, because a mask cannot multiply.

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta, the distance kernel's
parameters.

Caution: memory is quadratic if there is a bias. Without a bias, a boolean mask [T, S] is needed if
there are several queries and the first query is not at position 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.attention.backend import Backend, Request, missing, weighted
from megatron.attention.call import Call

_sdpa: Any = torch.nn.functional.scaled_dot_product_attention


def sdpa(call: Call) -> Tensor:
    """Compute the attention output of `call`; see `choice.AttentionFn.__call__`."""
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
    assert bias_HTS is not None  # `refusal` excludes distance kernels that have only a factor
    mask_1HTS = bias_HTS.masked_fill(distance_TS < 0, -torch.inf)[None]
    inputs = (x.to(dtype) for x in (q_BHTE, k_BHSE, v_BHSE))
    return _sdpa(*inputs, attn_mask=mask_1HTS, **options).to(q_BHTE.dtype)


def refusal(request: Request) -> str | None:
    if why := missing(request):
        return f"does not serve {why}"
    if weighted(request.pos):
        return f"has no place for {request.pos.name}, which multiplies scores"
    if request.pos.has("distance") and request.training:
        return (
            f"would need memory quadratic in the length to train with {request.pos.name} (it "
            "serves embeddings without a distance kernel, and evaluation)"
        )
    return None


def remark(request: Request) -> str:
    return "with the kernel as a quadratic mask" if request.pos.has("distance") else ""


BACKEND = Backend("sdpa", sdpa, refusal, remark)
