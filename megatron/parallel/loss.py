"""Compute the cross-entropy loss of a language model.

    loss[b, t] = lse[b, t] - logits[b, t, targets[b, t]] + z_loss lse[b, t]^2
    lse[b, t]  = logsumexp_v(logits[b, t, v])

The last term keeps the softmax's denominator close to 1 (Chowdhery et al. 2022, arXiv 2204.02311).
It is absent if its factor z_loss is 0. The logits of a sequence are computed piece by piece, and
again in the backward pass, so that the logits of a large batch never exist all at once.

Legend: B batch, T positions, V padded vocabulary, W this rank's slice of the vocabulary (V / size),
R ranks that split a sequence.

If the vocabulary is sharded over a tensor-parallel group, the group reduces three [B, T] tensors
(the maximum, the sum of exponentials and the target's logit). Thus the logits are never gathered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.parallel.groups import ALONE, TensorGroup

UNCOUNTED = -1
"""Stands for a target that does not count in the loss. Its own loss is 0."""


def inputs_and_targets(tokens_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split sequences of S tokens into inputs and targets, both [batch, S - 1].

    Args:
        tokens_BS: int64 token ids [batch, S]. A negative number ~id stands for the token `id`,
            which is then an input, but not a target.
    """
    inputs_BT = tokens_BS[:, :-1]
    return torch.where(inputs_BT < 0, ~inputs_BT, inputs_BT), tokens_BS[:, 1:].clamp(min=UNCOUNTED)


LOGITS_AT_ONCE = 1 << 26
"""The largest number of logits in a piece of a sequence (256 MB in fp32)."""


def losses_in_pieces(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    x_BTD: torch.Tensor,
    targets_BT: torch.Tensor,
    vocab_size: int,
    tp: TensorGroup = ALONE,
    *,
    ranks: int = 1,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return the loss of each target in nats, [batch, positions], computed piece by piece.

    Args:
        logits_of: A function from the hidden states of some positions to their logits. It must not
            draw random numbers.
        x_BTD: The hidden states of this rank's positions.
        targets_BT: int64 ids of the full vocabulary, or `UNCOUNTED` for a target without loss.
        vocab_size: The padded vocabulary size.
        tp: The group of ranks over which the vocabulary is sharded.
        ranks: The number of ranks that split each sequence.
        z_loss: The coefficient of the loss term logsumexp(logits)^2.
    """

    def losses(x_BPD: torch.Tensor, targets_BRP: torch.Tensor) -> torch.Tensor:
        found = token_losses(logits_of(x_BPD), targets_BRP.flatten(1), tp, z_loss)
        return found.view(targets_BRP.shape)

    width = max(1, LOGITS_AT_ONCE // (x_BTD.shape[0] * ranks * vocab_size))
    targets_BRT = targets_BT.unflatten(1, (ranks, -1))
    pairs = list(zip(x_BTD.split(width, 1), targets_BRT.split(width, 2), strict=True))
    if len(pairs) > 1 and torch.is_grad_enabled():
        # The logits of a piece cover its positions on all `ranks`.
        pieces = [  # the backward pass computes the logits of each piece again
            checkpoint(losses, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in pairs
        ]
    else:
        pieces = [losses(*pair) for pair in pairs]
    return torch.cat(pieces, dim=2).flatten(1)


def token_losses(
    logits_BTW: torch.Tensor, targets_BT: torch.Tensor, tp: TensorGroup = ALONE, z_loss: float = 0.0
) -> torch.Tensor:
    """Return the loss of each target in nats, [batch, positions], on every rank.

    Losses are computed in fp32, or in float64 for float64 logits.

    Args:
        logits_BTW: The logits of this rank's slice of the vocabulary.
        targets_BT: int64 ids of the full vocabulary, or `UNCOUNTED` for a target without loss.
        tp: The group of ranks over which the vocabulary is sharded.
        z_loss: The coefficient of the loss term logsumexp(logits)^2.
    """
    dtype = torch.promote_types(logits_BTW.dtype, torch.float32)
    if tp.size > 1:
        losses_BT = _ShardedCrossEntropy.apply(logits_BTW.to(dtype), targets_BT, tp, z_loss)
        return losses_BT.masked_fill(targets_BT == UNCOUNTED, 0.0)
    wide_BTV = logits_BTW.to(dtype)
    flat = F.cross_entropy(
        wide_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none", ignore_index=UNCOUNTED
    )
    losses_BT = flat.view(targets_BT.shape)
    if z_loss:
        z_BT = z_loss * wide_BTV.logsumexp(-1).square()
        losses_BT = losses_BT + z_BT.masked_fill(targets_BT == UNCOUNTED, 0.0)
    return losses_BT


def mean_loss(
    losses_BT: torch.Tensor, targets_BT: torch.Tensor, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean loss of all targets that count, or 0 if there are none.

    Args:
        losses_BT: The loss of each target [batch, positions].
        targets_BT: The targets. `UNCOUNTED` marks those that do not count.
        divisor: The number by which the sum of the losses is divided. None means the number of
            targets that count.
    """
    counted = (targets_BT != UNCOUNTED).sum().clamp(min=1) if divisor is None else divisor
    return losses_BT.sum() / counted


class _ShardedCrossEntropy(torch.autograd.Function):
    """Autograd function: cross-entropy of logits that are sharded by vocabulary."""

    @staticmethod
    def forward(ctx, logits_BTW, targets_BT, tp, z_loss):
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
        loss_BT, scale_BT = total_BT.log() - hit_BT, total_BT
        if z_loss:
            lse_BT = total_BT.log() + top_BT
            loss_BT = loss_BT + z_loss * lse_BT.square()
            scale_BT = total_BT / (1.0 + 2.0 * z_loss * lse_BT)
        ctx.save_for_backward(exp_BTW.div_(scale_BT.unsqueeze(-1)), local_BT1, elsewhere_BT1)
        return loss_BT

    @staticmethod
    def backward(ctx, grad_BT):
        scaled_BTW, local_BT1, elsewhere_BT1 = ctx.saved_tensors
        here_BT1 = (~elsewhere_BT1).to(scaled_BTW.dtype)
        dlogits_BTW = scaled_BTW.scatter_add(-1, local_BT1, -here_BT1)
        return dlogits_BTW.mul_(grad_BT.unsqueeze(-1)), None, None, None


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if the loss is above 709.78, where exp overflows float64."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
