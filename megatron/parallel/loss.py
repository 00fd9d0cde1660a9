"""Cross-entropy of a language model.

    loss[b, t] = logsumexp_v(logits[b, t, v]) - logits[b, t, targets[b, t]]

Legend: B batch, T positions, V padded vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def token_losses(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Loss of each target in nats, [B, T].

    Computed in fp32 whatever the logits' dtype (float64 logits stay float64), as the published
    code does. `targets_BT` is int64.
    """
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    flat = F.cross_entropy(
        logits_BTV.flatten(0, 1).to(dtype), targets_BT.flatten(), reduction="none"
    )
    return flat.view(targets_BT.shape)
