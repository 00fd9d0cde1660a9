"""Compute blocked attention as an autograd function (see `blocked`).

Exported models contain a copy of this file (see `megatron.hub.bundle`).

Legend: see `blocked`. N columns of theta.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.attention.call import Call
from megatron.attention.first_order import first_order
from megatron.attention.tiled.blocked_call import BlockedCall
from megatron.attention.tiled.row_bias import RowBias


def arguments_of(call: Call) -> tuple[tuple[Tensor | None, ...], tuple]:
    """Convert an attention call to (inputs, others), the arguments of `run`.

    `inputs` are the tensors. `others` are all other arguments.
    """
    q_BHTE, k_BHSE, v_BHSE = call.q_BHTE, call.k_BKSE, call.v_BKSE
    heads, keys, device = q_BHTE.shape[1], k_BHSE.shape[2], q_BHTE.device
    dtype = torch.promote_types(q_BHTE.dtype, torch.float32)
    bias_HS = weight_HS = None
    theta_HN = positions_BT = None
    if call.has_kernel:
        theta_HN = call.theta.to(torch.promote_types(call.theta.dtype, dtype))
        distance_S = torch.arange(keys, device=device)
        weight_HS = call.pos.weight(theta_HN, distance_S)
        some = distance_S[:1]
        if call.pos.reads_position and call.pos.bias_at(theta_HN, some, some) is not None:
            positions_BT = call.positions().flip(1)
        else:
            bias_HS, theta_HN = call.pos.bias(theta_HN, distance_S), None
    if bias_HS is None:
        bias_HS = torch.zeros(heads, keys, device=device)  # still carries the causal mask
    bias_HS = bias_HS.to(dtype)
    if call.window is not None:
        hidden_S = torch.arange(keys, device=device) > call.window
        bias_HS = bias_HS.masked_fill(hidden_S, -torch.inf)
    weight_HS = None if weight_HS is None else weight_HS.to(dtype)
    starts_BT = call.query_starts()
    if starts_BT is not None:
        starts_BT = starts_BT.flip(1)
    seed = torch.randint(1 << 62, (), device=device) if call.dropout_p else None
    terms = (call.decay_BHS, call.sink_H, starts_BT, seed)
    inputs = (q_BHTE, k_BHSE, v_BHSE, bias_HS, weight_HS, *terms, theta_HN, positions_BT)
    return inputs, (call.scale, call.dropout_p, call.window, call.pos, call.return_lse)


def run(inputs: tuple[Tensor | None, ...], others: tuple) -> Any:
    """Return the output of attention computed tile by tile.

    Args:
        inputs: The tensors `q_BHTE` to `seed` of `BlockedCall`, then theta and the positions of the
            queries, which only some biases need.
        others: (scale, dropout_p, window, pos, return_lse). If `return_lse` is true, the result is
            (output, lse).
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _BlockedAttention.apply(*inputs, *others)
    return _call(inputs, others).forward(None, return_lse=others[-1])


def _call(inputs: Sequence[Any], others: Sequence[Any]) -> BlockedCall:
    """Return a `BlockedCall` made of the arguments of the autograd function."""
    *inputs, theta_HN, positions_BT = inputs
    *numbers, pos, _ = others
    row_bias = None
    if theta_HN is not None:
        row_bias = RowBias(pos, theta_HN, positions_BT, inputs[1].shape[2])
    return BlockedCall(*inputs, *numbers, row_bias=row_bias)


class _BlockedAttention(torch.autograd.Function):
    """Autograd function of attention that is computed tile by tile."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Compute the output, and save what the backward pass needs."""
        inputs, ctx.others = arguments[:11], arguments[11:]
        call = _call(inputs, ctx.others)
        kept = call.new_kept()
        ctx.save_for_backward(*inputs, kept)
        return call.forward(kept, return_lse=ctx.others[-1])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_BHTE: Tensor, dlse_BHT: Tensor | None = None) -> tuple:
        *inputs, kept = ctx.saved_tensors
        call = _call(inputs, ctx.others)
        if dlse_BHT is not None:
            call.dlse_NT = dlse_BHT.flatten(0, 1).flip(1)
        *gradients, dtheta_HN = call.backward(
            grad_BHTE, kept, need_bias=ctx.needs_input_grad[3], need_weight=ctx.needs_input_grad[4]
        )
        return *gradients, None, None, dtheta_HN, *[None] * (1 + len(ctx.others))
