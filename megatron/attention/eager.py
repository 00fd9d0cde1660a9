"""Compute attention directly from its formula. This backend is the specification and not optimised.

    s_ij = scale (q_i . k_j) w_h(i - j) + b_h(i - j, i) + c_i - c_j, -inf where i does not see j
    out = dropout(softmax(s)) v

w and b are the factor and the bias of the distance kernel, which depend on the query-key distance.
(Some biases also depend on the query's position i in its document.) c is the decay. Query i sees
the keys first_i <= j <= i. (Without documents or a window, first_i is 0.) With a sink, the softmax
has one more key, the null key, whose logit is the sink and whose value is 0. The dtype of the
scores, w and b is at least fp32. `published_numerics` computes the same formula with the rounding
of the released KERPLE code. Exported models contain a copy of this file (see
`megatron.hub.bundle`).

Legend: B batch, H heads, T queries, S keys, E head size, N columns of theta, the distance kernel's
parameters.

Caution: several tensors of the size of the scores [B, H, T, S] are in memory at the same time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.call import Call


def eager(call: Call) -> Any:
    """Compute attention directly from its formula.

    Return the output [batch, heads, queries, head size], or (output, lse) if the call asks for lse.
    lse is the log-sum-exp of each softmax.
    """
    dtype = torch.promote_types(call.q_BHTE.dtype, torch.float32)
    scores_BHTS = call.scale * (call.q_BHTE.to(dtype) @ call.k_BKSE.to(dtype).mT)
    theta_HN = call.theta.to(torch.promote_types(call.theta.dtype, dtype))
    return attend_by_scores(call, scores_BHTS, theta_HN)


def attend_by_scores(call: Call, scores_BHTS: Tensor, theta_HN: Tensor) -> Any:
    """Return the attention output, given the scaled query-key products."""
    dtype, device = scores_BHTS.dtype, scores_BHTS.device
    key_S = torch.arange(call.k_BKSE.shape[2], device=device)
    # All later steps have the dtype of the scores. The distance kernel is evaluated in theta's.
    distance_TS = call.query_rows()[:, None] - key_S
    if call.has_kernel:
        weight_HTS = call.pos.weight(theta_HN, distance_TS.clamp(min=0))
        bias_BHTS = call.bias(theta_HN, distance_TS)
        if weight_HTS is not None:
            scores_BHTS = scores_BHTS * weight_HTS.to(dtype)
        if bias_BHTS is not None:
            scores_BHTS = scores_BHTS + bias_BHTS.to(dtype)
    if (lost_BHTS := call.lost(dtype)) is not None:
        scores_BHTS = scores_BHTS - lost_BHTS
    scores_BHTS = scores_BHTS.masked_fill(call.hidden(distance_TS), -torch.inf)
    logits_BHTX = call.with_null_key(scores_BHTS)
    probs_BHTS = torch.softmax(logits_BHTX, dim=-1)[..., : key_S.shape[0]]
    probs_BHTS = F.dropout(probs_BHTS, call.dropout_p)
    out_BHTE = (probs_BHTS @ call.v_BKSE.to(dtype)).to(call.q_BHTE.dtype)
    return (out_BHTE, logits_BHTX.logsumexp(-1)) if call.return_lse else out_BHTE
