"""Eager attention: the specification, written as its formula and not optimised.

    s_ij = scale (q_i . k_j) w_h(i - j) + b_h(i - j), -inf where j > i
    out = dropout(softmax(s)) v

Scores and kernels are fp32 at least. `published` is the same formula with the released code's
rounding.

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta.

Caution: the [B, H, T, S] score matrix and the [H, T, S] kernels are materialised, several times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.backend import Backend, Call


def eager(call: Call) -> Tensor:
    """See `choice.AttentionFn`."""
    dtype = torch.promote_types(call.q_BHTE.dtype, torch.float32)
    scores_BHTS = call.scale * (call.q_BHTE.to(dtype) @ call.k_BKSE.to(dtype).mT)
    theta_HN = None
    if call.has_kernel:
        theta_HN = call.theta.to(torch.promote_types(call.theta.dtype, dtype))
    return attend_by_scores(call, scores_BHTS, theta_HN)


def attend_by_scores(call: Call, scores_BHTS: Tensor, theta_HN: Tensor | None) -> Tensor:
    """Apply kernel, mask, softmax and dropout to the scaled products, in their dtype.

    Args:
        theta_HN: in the dtype in which the kernel is evaluated; None without a kernel.
    """
    dtype, device = scores_BHTS.dtype, scores_BHTS.device
    query_T = torch.arange(call.q_BHTE.shape[2], device=device) + call.query_offset
    key_S = torch.arange(call.k_BKSE.shape[2], device=device)
    distance_TS = query_T[:, None] - key_S
    if theta_HN is not None:
        weight_HTS = call.pos.weight(theta_HN, distance_TS.clamp(min=0))
        bias_HTS = call.pos.bias(theta_HN, distance_TS.clamp(min=0))
        if weight_HTS is not None:
            scores_BHTS = scores_BHTS * weight_HTS.to(dtype)
        if bias_HTS is not None:
            scores_BHTS = scores_BHTS + bias_HTS.to(dtype)
    scores_BHTS = scores_BHTS.masked_fill(distance_TS < 0, -torch.inf)
    probs_BHTS = F.dropout(torch.softmax(scores_BHTS, dim=-1), call.dropout_p)
    return (probs_BHTS @ call.v_BKSE.to(dtype)).to(call.q_BHTE.dtype)


BACKEND = Backend("eager", eager)
