"""Compute eager attention, with the rounding of the released KERPLE code.

The formula is that of `eager`. Scores, biases and factors have the dtype of the activations and are
rounded after each operation. One `baddbmm` computes the query-key products and scales them before
it rounds them.

The config key `attention_backend` calls this backend `eager`, too. If the embedding has
`PublishedNumerics` (config key `published_numerics`), `choice` uses this backend instead of the
module `eager`.

Legend and caution: see `eager`.
"""

import torch
from torch import Tensor

from megatron.attention.backend import Backend
from megatron.attention.call import Call
from megatron.attention.eager import attend_by_scores


def published_eager(call: Call) -> Tensor:
    """Compute attention from its formula, and round as the released KERPLE code does."""
    flat_q, flat_k = call.q_BHTE.flatten(0, 1), call.k_BKSE.flatten(0, 1)
    products = torch.baddbmm(flat_q.new_zeros(1), flat_q, flat_k.mT, beta=0, alpha=call.scale)
    scores_BHTS = products.unflatten(0, call.q_BHTE.shape[:2])
    return attend_by_scores(call, scores_BHTS, call.theta.to(scores_BHTS.dtype))


BACKEND = Backend("eager", published_eager)
