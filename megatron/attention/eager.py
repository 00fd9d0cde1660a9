"""Eager attention: the specification, written as its formula and no faster than that.

    s_ij = scale (q_i . k_j) w_h(i - j) + b_h(i - j), -inf where j > i
    out = dropout(softmax(s)) v

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta.

Scores and kernels are fp32 at least; only with `PublishedNumerics` are
they as coarse as the activations, rounded after each operation.

Caution: the [B, H, T, S] score matrix and the [H, T, S] kernels exist as a whole, several times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.backend import Backend
from megatron.positional import PositionalEmbedding


def eager(
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
    dtype, device = pos.numerics.working_dtype(q_BHTE.dtype), q_BHTE.device
    query_T = torch.arange(q_BHTE.shape[2], device=device) + query_offset
    key_S = torch.arange(k_BHSE.shape[2], device=device)
    distance_TS = query_T[:, None] - key_S
    if not pos.numerics.published:
        scores_BHTS = scale * (q_BHTE.to(dtype) @ k_BHSE.to(dtype).mT)
    else:  # scaled before it is rounded
        flat_q, flat_k = q_BHTE.flatten(0, 1), k_BHSE.flatten(0, 1)
        scores_BHTS = torch.baddbmm(flat_q.new_zeros(1), flat_q, flat_k.mT, beta=0, alpha=scale)
        scores_BHTS = scores_BHTS.unflatten(0, q_BHTE.shape[:2])
    if pos.kind == "distance":
        wide = torch.promote_types(theta_HN.dtype, dtype)
        theta_HN = theta_HN.to(dtype if pos.numerics.published else wide)
        weight_HTS = pos.weight(theta_HN, distance_TS.clamp(min=0))
        bias_HTS = pos.bias(theta_HN, distance_TS.clamp(min=0))
        if weight_HTS is not None:
            scores_BHTS = scores_BHTS * weight_HTS.to(dtype)
        if bias_HTS is not None:
            scores_BHTS = scores_BHTS + bias_HTS.to(dtype)
    scores_BHTS = scores_BHTS.masked_fill(distance_TS < 0, -torch.inf)
    probs_BHTS = F.dropout(torch.softmax(scores_BHTS, dim=-1), dropout_p)
    return (probs_BHTS @ v_BHSE.to(dtype)).to(q_BHTE.dtype)


BACKEND = Backend("eager", eager, rounds_as_published=True)
