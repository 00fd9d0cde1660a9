"""Compute the cross-entropy loss of a language model.

    loss[b, t] = logsumexp_v(logits[b, t, v]) - logits[b, t, targets[b, t]]

Legend: B batch, T positions, V padded vocabulary, W this rank's slice of the vocabulary (V / size).

If the vocabulary is sharded over a tensor-parallel group, the group reduces three [B, T] tensors
(the maximum, the sum of exponentials and the target's logit). Thus the logits are never gathered.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.parallel.groups import ALONE, TensorGroup

UNCOUNTED = -1
"""Stands for a target that does not count in the loss. Its own loss is 0."""


def token_losses(
    logits_BTW: torch.Tensor, targets_BT: torch.Tensor, tp: TensorGroup = ALONE
) -> torch.Tensor:
    """Return the loss of each target in nats, [batch, positions], on every rank.

    Logits are cast to fp32 as in GPT-NeoX, but float64 logits stay float64.

    Args:
        targets_BT: int64 ids of the full vocabulary, or `UNCOUNTED` for a target without loss.
    """
    dtype = torch.promote_types(logits_BTW.dtype, torch.float32)
    if tp.size > 1:
        losses_BT = _ShardedCrossEntropy.apply(logits_BTW.to(dtype), targets_BT, tp)
        return losses_BT.masked_fill(targets_BT == UNCOUNTED, 0.0)
    flat = F.cross_entropy(
        logits_BTW.flatten(0, 1).to(dtype),
        targets_BT.flatten(),
        reduction="none",
        ignore_index=UNCOUNTED,
    )
    return flat.view(targets_BT.shape)


def mean_loss(losses_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of all targets except `UNCOUNTED`, or 0 if all are `UNCOUNTED`."""
    return losses_BT.sum() / (targets_BT != UNCOUNTED).sum().clamp(min=1)


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over logits that are sharded by vocabulary.

    The gradient d loss / d logit_v is softmax_v, minus 1 if v is the target. Each rank computes the
    gradient of its own slice of the vocabulary.
    """

    @staticmethod
    def forward(ctx, logits_BTW, targets_BT, tp):
        width = logits_BTW.shape[-1]
        top_BT = logits_BTW.amax(-1)
        dist.all_reduce(top_BT, op=dist.ReduceOp.MAX, group=tp.group)
        shifted_BTW = logits_BTW - top_BT.unsqueeze(-1)
        local_BT1 = (targets_BT - tp.rank * width).unsqueeze(-1)
        elsewhere_BT1 = (local_BT1 < 0) | (local_BT1 >= width)
        local_BT1 = local_BT1.masked_fill(elsewhere_BT1, 0)
        hit_BT1 = shifted_BTW.gather(-1, local_BT1).masked_fill(elsewhere_BT1, 0.0)
        exp_BTW = shifted_BTW.exp_()
        sums_2BT = torch.stack([exp_BTW.sum(-1), hit_BT1.squeeze(-1)])
        dist.all_reduce(sums_2BT, group=tp.group)
        total_BT, hit_BT = sums_2BT
        ctx.save_for_backward(exp_BTW.div_(total_BT.unsqueeze(-1)), local_BT1, elsewhere_BT1)
        return total_BT.log() - hit_BT

    @staticmethod
    def backward(ctx, grad_BT):
        softmax_BTW, local_BT1, elsewhere_BT1 = ctx.saved_tensors
        here_BT1 = (~elsewhere_BT1).to(softmax_BTW.dtype)
        dlogits_BTW = softmax_BTW.scatter_add(-1, local_BT1, -here_BT1)
        return dlogits_BTW.mul_(grad_BT.unsqueeze(-1)), None, None


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if the loss is above 709.78, where float64 overflows."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
