"""Compute attention of short sequences with few operations.

The formulas are those of `blocked`. A tile holds some query rows of all heads of many sequences,
and the keys up to the last of these rows. If sequences are short, then the time of `BlockedCall`
goes into copies and into calls of small operations. Here the queries keep their order, the softmax
is computed in place, the probabilities P are kept for the backward pass, and the output is written
in the order in which the next layer reads it.

Legend: see `blocked`; G sequences of a tile. The T axis is in the usual order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.attention.first_order import first_order
from megatron.attention.tiled import blocked_call, tiles
from megatron.attention.tiled.toeplitz import DistanceVector, diagonal_sums

LONGEST = 256
"""The largest number of positions of a short sequence. At 512, `BlockedCall` is as fast."""


def is_short(q_BHTE: Tensor, k_BHSE: Tensor, _v: Tensor, _bias: Tensor, *others: Any) -> bool:
    """Return whether this file serves a call with these arguments of `BlockedCall`.

    The call must have a bias at most, no other term. The sequences must be so short that P may be
    kept (see `blocked_call.KEPT_SHARE`).
    """
    *terms, _scale, _dropout_p, window = others
    queries, size = q_BHTE.shape[2:]
    alone = window is None and all(x is None for x in terms)
    if not alone or queries != k_BHSE.shape[2] or queries > LONGEST:
        return False
    scores = sum((end - first) * end for _, first, end in _tiles(1, 1, queries))
    return scores <= blocked_call.KEPT_SHARE * 4 * queries * size


def _tiles(batch: int, heads: int, length: int) -> Iterator[tuple[slice, int, int]]:
    """Yield (sequences, first row, end) of each tile. The last rows of a sequence come first."""
    rows = tiles.block_rows(length, length)
    step = max(1, tiles.BUFFER_ELEMENTS // (heads * rows * length))
    for end in range(length, 0, -rows):
        for b in range(0, batch, step):
            yield slice(b, min(b + step, batch)), max(0, end - rows), end


def _flat(x_BHTE: Tensor, dtype: torch.dtype) -> Tensor:
    return x_BHTE.to(dtype).reshape(-1, *x_BHTE.shape[2:])


def forward(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, bias_HT: Tensor, scale: float,
    kept: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return the output; see `BlockedCall` for the arguments.

    Args:
        kept: A list to which the probabilities of each tile are appended, or None.
    """
    B, H, T, E = q_BHTE.shape
    q_NTE, k_NTE, v_NTE = (_flat(x, bias_HT.dtype) for x in (q_BHTE, k_BHTE, v_BHTE))
    vector, bias_HRn = DistanceVector(bias_HT, tiles.block_rows(T, T), -torch.inf), bias_HT
    out_BTHE = q_BHTE.new_empty(B, T, H, E)
    for some, first, end in _tiles(B, H, T):
        items, rows = slice(some.start * H, some.stop * H), slice(first, end)
        if some.start == 0:
            bias_HRn = vector.block(slice(None), end - first, end).flip(1)
        probs_mRn = bias_HRn.repeat(some.stop - some.start, 1, 1)  # a copy, also of one
        probs_mRn.baddbmm_(q_NTE[items, rows], k_NTE[items, :end].mT, alpha=scale)
        torch.softmax(probs_mRn, dim=-1, out=probs_mRn)
        out_mRE = torch.bmm(probs_mRn, v_NTE[items, :end])
        out_BTHE[some, rows] = out_mRE.unflatten(0, (-1, H)).transpose(1, 2)
        if kept is not None:
            kept.append(probs_mRn)
    return out_BTHE.transpose(1, 2)


def backward(
    grad_BHTE: Tensor, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, kept: list[Tensor],
    scale: float, *, need_bias: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v and the bias. The last is None unless `need_bias`.

    Args:
        kept: The list that `forward` has filled.
    """
    B, H, T, E = q_BHTE.shape
    inputs = q_BHTE, k_BHTE, v_BHTE, grad_BHTE
    q_NTE, k_NTE, v_NTE, grad_NTE = (_flat(x, kept[0].dtype) for x in inputs)
    dq_BTHE = q_BHTE.new_empty(B, T, H, E)
    dk_NTE, dv_NTE = torch.empty_like(k_NTE), torch.empty_like(v_NTE)
    db_HT = q_NTE.new_zeros(H, T) if need_bias else None
    for (some, first, end), probs_mRn in zip(_tiles(B, H, T), kept, strict=True):
        items, rows = slice(some.start * H, some.stop * H), slice(first, end)
        q_mRE, grad_mRE = q_NTE[items, rows], grad_NTE[items, rows]
        ds_mRn = torch.bmm(grad_mRE, v_NTE[items, :end].mT)
        torch.ops.aten._softmax_backward_data(  # row by row, so it can be done in place
            ds_mRn, probs_mRn, -1, ds_mRn.dtype, grad_input=ds_mRn
        )
        dv_mnE, dk_mnE = dv_NTE[items, :end], dk_NTE[items, :end]
        if end == T:
            torch.bmm(probs_mRn.mT, grad_mRE, out=dv_mnE)
            torch.baddbmm(dk_mnE, ds_mRn.mT, q_mRE, beta=0.0, alpha=scale, out=dk_mnE)
        else:
            dv_mnE += torch.bmm(probs_mRn.mT, grad_mRE)
            dk_mnE.add_(torch.bmm(ds_mRn.mT, q_mRE), alpha=scale)
        dq_GHRE = torch.bmm(ds_mRn, k_NTE[items, :end]).unflatten(0, (-1, H))
        torch.mul(dq_GHRE.transpose(1, 2), scale, out=dq_BTHE[some, rows])
        if db_HT is not None:
            db_HT[:, :end] += diagonal_sums(ds_mRn.unflatten(0, (-1, H)).sum(0), first)
    dk_BHTE, dv_BHTE = (x.view(B, H, T, E).to(q_BHTE.dtype) for x in (dk_NTE, dv_NTE))
    return dq_BTHE.transpose(1, 2), dk_BHTE, dv_BHTE, db_HT


class ShortAttention(torch.autograd.Function):
    """Autograd function (q, k, v, bias, scale) -> output. It keeps P for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        q_BHTE, k_BHTE, v_BHTE, bias_HT, ctx.scale = arguments
        kept = [] if any(ctx.needs_input_grad) else None
        out_BHTE = forward(q_BHTE, k_BHTE, v_BHTE, bias_HT, ctx.scale, kept)
        ctx.save_for_backward(q_BHTE, k_BHTE, v_BHTE, *(kept or ()))
        return out_BHTE

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_BHTE: Tensor) -> tuple:
        q_BHTE, k_BHTE, v_BHTE, *kept = ctx.saved_tensors
        need_bias, arguments = ctx.needs_input_grad[3], (q_BHTE, k_BHTE, v_BHTE, kept, ctx.scale)
        return *backward(grad_BHTE, *arguments, need_bias=need_bias), None
