"""torch's scaled_dot_product_attention, for what it can do.

Without a kernel of distance it is as good as any. A bias becomes an additive mask [1, H, T, S] in
fp32 (q, k and v then are too: a mask in bf16 would round the bias): for evaluation only, since the
gradient of such a mask is as large as [B, H, T, S]. A multiplicative kernel is no mask.

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta.

Caution: quadratic memory with a bias, and [T, S] booleans for several queries at an offset.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.backend import Backend, Use, weighted
from megatron.positional import PositionalEmbedding


def sdpa(
    q_BHTE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None,
    *,
    scale: float,
    dropout_p: float,
    query_offset: int,
) -> Tensor:
    """See :class:`megatron.attention.choice.AttentionFn`."""
    queries, keys, device = q_BHTE.shape[2], k_BHSE.shape[2], q_BHTE.device
    options = {"scale": scale, "dropout_p": dropout_p}
    if pos.kind != "distance" and (query_offset == 0 or queries == 1):
        causal = query_offset == 0
        return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, is_causal=causal, **options)
    distance_TS = torch.arange(query_offset, keys, device=device)[:, None]
    distance_TS = distance_TS - torch.arange(keys, device=device)
    if pos.kind != "distance":
        mask = distance_TS >= 0
        return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, mask, **options)
    dtype = torch.promote_types(q_BHTE.dtype, torch.float32)
    bias_HTS = pos.bias(theta_HN.to(dtype), distance_TS.clamp(min=0))
    mask = bias_HTS.masked_fill(distance_TS < 0, -torch.inf)[None]
    inputs = (x.to(dtype) for x in (q_BHTE, k_BHSE, v_BHSE))
    return F.scaled_dot_product_attention(*inputs, mask, **options).to(q_BHTE.dtype)


def refusal(use: Use) -> str | None:
    if weighted(use.pos):
        return f"has no place for {use.pos.name}, which multiplies scores"
    if use.pos.kind == "distance" and use.training:
        return (
            f"would need memory quadratic in the length to train with {use.pos.name} (it serves "
            "embeddings without a kernel of distance, and evaluation)"
        )
    return None


def remark(use: Use) -> str:
    return "with the kernel as a quadratic mask" if use.pos.kind == "distance" else ""


BACKEND = Backend("sdpa", sdpa, refusal, remark)
