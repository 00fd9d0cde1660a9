"""Compute causal attention over blocks of query rows, with exact gradients and no quadratic buffer.

    S = scale (Q K^T) w + b, masked          P = softmax(S)          O = P V
    dV = P^T dO        dS = P (dO V^T - rowsum(P dO V^T))        dX = dS w   (X = scale Q K^T)
    dQ = scale dX K    dK = scale dX^T Q
    db(d) = sum of dS over all pairs at distance d     dw(d) = sum of dS X over the same pairs

Here dX, dV and so on are the gradients of the loss with respect to X, V and so on. b and w are the
bias and the factor of a distance kernel, which depend on the query-key distance d.
`tiled.decay_and_sink` has the formulas of the decay and the sink.

This backend is pure torch and written for CPUs. Nearly all of its time is spent in matrix products,
and the scores of keys after a block's last query are never computed. The embedding's formula
computes b and w before the call, as vectors over distances in at least fp32. Therefore autograd
propagates db and dw to the kernel's parameters. If b also depends on the query's position, it is
computed tile by tile (`tiled.row_bias`). The order of queries is reversed (`tiled.toeplitz` gives
the reason). With a window, b is -inf at distances longer than the window. A block skips keys that
none of its queries sees because of the window, or because the keys are in an earlier document.

In addition to the results, memory is needed for contiguous copies of the inputs and for buffers of
the size of one tile's scores (see `tiled.tiles`). The forward pass needs one such buffer, and the
backward pass needs two. With a factor w or with dropout, the forward pass needs one more. The
backward pass needs one more for w, and one more for dropout or a sink. For long sequences, the
backward pass computes P again. For short sequences, P is hardly larger than the inputs. P is then
kept (`blocked_call.KEPT_SHARE`), which saves a sixth of the time.

Legend: B batch, H heads, N = B H (flattened), T queries, S keys, E head size, R rows and n keys of
a tile, m pairs (sequence, head) of a tile. In this file, the T axis is in reversed order.

Caution: the last bits of the results depend on the number of threads, as for torch's matrix
products. With the same number of threads, the results are repeatable bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from megatron.attention import operations
from megatron.attention.backend import Backend, first_order, wants_gradients
from megatron.attention.call import Call
from megatron.attention.eager import eager
from megatron.attention.tiled.blocked_call import BlockedCall
from megatron.attention.tiled.row_bias import RowBias
from megatron.attention.tiled.short_attention import ShortAttention, is_short


def blocked(call: Call) -> Any:
    """Compute the attention output of `call`; see `choice.AttentionFn.__call__`."""
    q_BHTE, k_BHSE, v_BHSE = call.q_BHTE, call.k_BKSE, call.v_BKSE
    if q_BHTE.shape[2] == 1 and not wants_gradients(call) and not call.dropout_p:
        return eager(call)  # a single row needs neither blocks nor copies of the keys
    heads, keys, device = q_BHTE.shape[1], k_BHSE.shape[2], q_BHTE.device
    dtype = torch.promote_types(q_BHTE.dtype, torch.float32)
    bias_HS = weight_HS = None
    theta_HN = positions_BT = None
    if call.has_kernel:
        theta_HN = call.theta.to(torch.promote_types(call.theta.dtype, dtype))
        distance_S = torch.arange(keys, device=device)
        weight_HS = call.pos.weight(theta_HN, distance_S)
        if call.pos.reads_position:
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
    starts_BT = call.starts_BS
    if starts_BT is not None:
        starts_BT = starts_BT[:, call.query_offset : keys].flip(1)
    seed = torch.randint(1 << 62, (), device=device) if call.dropout_p else None
    terms = (call.decay_BHS, call.sink_H, starts_BT, seed)
    inputs = (q_BHTE, k_BHSE, v_BHSE, bias_HS, weight_HS, *terms)
    numbers = call.scale, call.dropout_p, call.window
    if is_compiling() and theta_HN is None:
        # without keeping P, whose size may depend on where documents start
        return operations.blocked(*inputs, *numbers)
    if theta_HN is None and not call.return_lse and is_short(*inputs, *numbers):
        return ShortAttention.apply(*inputs[:4], call.scale)
    run = _outside_of_graphs if is_compiling() else _run
    return run((*inputs, theta_HN, positions_BT), (*numbers, call.pos, call.return_lse))


def _run(inputs: tuple[Tensor | None, ...], others: tuple) -> Any:
    """Return the attention output, or (output, lse) if `return_lse` is true.

    Args:
        inputs: The arguments `q_BHTE` to `seed` of `BlockedCall`, theta_HN and positions_BT. The
            last two are None unless the bias depends on the query's position.
        others: (scale, dropout_p, window, embedding, return_lse).
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _BlockedAttention.apply(*inputs, *others)
    return _call(inputs, others).forward(None, return_lse=others[-1])


# As `torch.compiler.disable`, which would import the compiler now. This does so when it is called.
_outside_of_graphs = torch._disable_dynamo(_run)  # pyright: ignore[reportPrivateImportUsage]


def _call(inputs: Sequence[Any], others: Sequence[Any]) -> BlockedCall:
    """Return the `BlockedCall` for the arguments of `_run`."""
    *inputs, theta_HN, positions_BT = inputs
    *numbers, pos, _ = others
    row_bias = None
    if theta_HN is not None:
        row_bias = RowBias(pos, theta_HN, positions_BT, inputs[1].shape[2])
    return BlockedCall(*inputs, *numbers, row_bias=row_bias)


class _BlockedAttention(torch.autograd.Function):
    """Autograd function of blocked attention.

    For the backward pass, it saves its inputs. It also saves the attention probabilities if they
    need little memory (see `BlockedCall.new_kept`).
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Return what `_run(inputs, others)` returns. `arguments` are `(*inputs, *others)`."""
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


BACKEND = Backend("blocked", blocked, remark=lambda request: "no quadratic buffer", gives_lse=True)
