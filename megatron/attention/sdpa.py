"""Compute attention by torch's scaled_dot_product_attention.

If there is no distance kernel, no decay and no sink, this backend serves every request. Documents
and windows become a boolean mask [B, 1, T, S].

A distance kernel is a bias or a factor that depends only on the query-key distance. A bias becomes
an additive fp32 mask [1, H, T, S], and a decay becomes an additive fp32 mask [B, H, T, S]. q, k and
v are then converted to fp32, because a bf16 mask would round the bias. For a sink, a key of zeros
and a value of zeros are appended, and the mask's last column contains the sink's logit. With an
additive mask the backend serves evaluation only, because the mask's gradient would need memory for
B H T S numbers. A factor is refused, because a mask cannot multiply.

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta, the distance kernel's
parameters.

Caution: memory is quadratic if there is a mask. Plain causal attention needs a mask (boolean, [T,
S]) only if there are several queries and the first query is not at position 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.backend import Backend, Request, weighted
from megatron.attention.call import Call

_sdpa: Any = F.scaled_dot_product_attention


def sdpa(call: Call) -> Tensor:
    """Compute attention by torch's `scaled_dot_product_attention`."""
    q_BHTE, k_BHSE, v_BHSE = call.q_BHTE, call.k_BKSE, call.v_BKSE
    options = {"scale": call.scale, "dropout_p": call.dropout_p}
    additive = call.has_kernel or call.decay_BHS is not None or call.sink_H is not None
    if not (additive or call.masked) and (call.query_offset == 0 or q_BHTE.shape[2] == 1):
        causal = call.query_offset == 0
        return _sdpa(q_BHTE, k_BHSE, v_BHSE, is_causal=causal, **options)
    key_S = torch.arange(k_BHSE.shape[2], device=q_BHTE.device)
    distance_TS = key_S[call.query_offset :, None] - key_S
    hidden_BHTS = call.hidden(distance_TS)
    if not additive:
        return _sdpa(q_BHTE, k_BHSE, v_BHSE, attn_mask=~hidden_BHTS, **options)
    dtype = torch.promote_types(q_BHTE.dtype, torch.float32)
    mask_BHTS = torch.zeros(1, q_BHTE.shape[1], 1, 1, dtype=dtype, device=q_BHTE.device)
    if call.has_kernel:
        bias_BHTS = call.bias(call.theta.to(dtype), distance_TS)
        assert bias_BHTS is not None  # `refusal` excludes distance kernels that have only a factor
        mask_BHTS = bias_BHTS.to(dtype)  # torch misreads a mask in another dtype
    if (lost_BHTS := call.lost(dtype)) is not None:
        mask_BHTS = mask_BHTS - lost_BHTS
    mask_BHTS = call.with_null_key(torch.where(hidden_BHTS, -torch.inf, mask_BHTS))
    if call.sink_H is not None:
        k_BHSE, v_BHSE = (F.pad(x, (0, 0, 0, 1)) for x in (k_BHSE, v_BHSE))
    inputs = (x.to(dtype) for x in (q_BHTE, k_BHSE, v_BHSE))
    return _sdpa(*inputs, attn_mask=mask_BHTS, **options).to(q_BHTE.dtype)


def refusal(request: Request) -> str | None:
    if weighted(request.pos):
        return f"has no place for {request.pos.name}, which multiplies scores"
    if _additive(request) and request.training:
        return (
            "would need memory quadratic in the length to train with a distance kernel, a sink or "
            "a forget gate (it serves training without them, and evaluation)"
        )
    return None


def remark(request: Request) -> str:
    return "with a quadratic mask" if _additive(request) or request.masked else ""


def _additive(request: Request) -> bool:
    """Return whether the attention mask is added to the scores. Otherwise, it is boolean."""
    return request.pos.has("distance") or request.pos.has("sink") or request.decays


BACKEND = Backend("sdpa", sdpa, refusal, remark)
