"""Compute causal attention over blocks of query rows, with exact gradients and no quadratic buffer.

    S = scale (Q K^T) w + b, masked          P = softmax(S)          O = P V
    dV = P^T dO        dS = P (dO V^T - rowsum(P dO V^T))        dX = dS w   (X = scale Q K^T)
    dQ = scale dX K    dK = scale dX^T Q
    db(d) = sum of dS over all pairs at distance d     dw(d) = sum of dS X over the same pairs

Here dX, dV and so on are the gradients of the loss with respect to X, V and so on. b and w are the
bias and the factor of a distance kernel, which depend only on the query-key distance d.

This backend is pure torch and written for CPUs. Nearly all of its time is spent in matrix products,
and the scores of keys after a block's last query are never computed. The embedding's formula
computes b and w before the call, as vectors over distances in at least fp32. Therefore autograd
propagates db and dw to the kernel's parameters. `toeplitz` explains why queries are reversed here.

In addition to the results, memory is needed for contiguous copies of the inputs and for buffers of
the size of one tile's scores (see `tiles`). The forward pass needs one such buffer, and the
backward pass needs two. With a factor w or with dropout, the forward pass needs one more. The
backward pass needs one more for w, and one more for dropout. For long sequences, the backward pass
computes P again. For short sequences, where P is hardly larger than the inputs, P is kept
(`KEPT_SHARE`), which saves a sixth of the time.

Legend: B batch, H heads, N = B H (flattened), T queries, S keys, E head size, R rows and n keys of
a tile, m pairs of sequence and head of a tile. In this file, the T axis is in reversed order.

Caution: the last bits of the results depend on the number of threads, as for torch's matrix
products. With the same number of threads, the results are repeatable bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.attention.backend import Backend, first_order
from megatron.attention.call import Call
from megatron.attention.tiles import QueryTile, block_rows, walk
from megatron.attention.toeplitz import DistanceVector, add_diagonal_sums

KEPT_SHARE = 1.5
"""The probabilities P are kept for the backward pass if size of P <= KEPT_SHARE * (size of q, k, v
and the output together). This is true up to a sequence length of about 10 times the head size, so
memory stays linear in T."""


def blocked(call: Call) -> Tensor:
    """Compute the attention output of `call`; see `choice.AttentionFn.__call__`."""
    q_BHTE, k_BHSE, v_BHSE = call.q_BHTE, call.k_BKSE, call.v_BKSE
    heads, keys, device = q_BHTE.shape[1], k_BHSE.shape[2], q_BHTE.device
    dtype = torch.promote_types(q_BHTE.dtype, torch.float32)
    bias_HS = weight_HS = None
    if call.has_kernel:
        theta_HN = call.theta.to(torch.promote_types(call.theta.dtype, dtype))
        distance_S = torch.arange(keys, device=device)
        bias_HS = call.pos.bias(theta_HN, distance_S)
        weight_HS = call.pos.weight(theta_HN, distance_S)
    if bias_HS is None:
        bias_HS = torch.zeros(heads, keys, device=device)  # still carries the causal mask
    bias_HS = bias_HS.to(dtype)
    weight_HS = None if weight_HS is None else weight_HS.to(dtype)
    seed = int(torch.randint(1 << 62, (), device=device)) if call.dropout_p else 0
    inputs = (q_BHTE, k_BHSE, v_BHSE, bias_HS, weight_HS)
    arguments = *inputs, call.scale, call.dropout_p, seed
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _BlockedAttention.apply(*arguments)
    return BlockedCall(*arguments).forward(None)


class _BlockedAttention(torch.autograd.Function):
    """Autograd function of blocked attention.

    For the backward pass it saves its inputs and, if they are small, the attention probabilities.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Compute the attention output. `arguments` are the arguments of `BlockedCall` in order."""
        inputs, ctx.numbers = arguments[:5], arguments[5:]
        call = BlockedCall(*arguments)
        kept = call.new_kept()
        ctx.save_for_backward(*inputs, kept)
        return call.forward(kept)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_BHTE: Tensor) -> tuple:
        *inputs, kept = ctx.saved_tensors
        gradients = BlockedCall(*inputs, *ctx.numbers).backward(
            grad_BHTE, kept, need_bias=ctx.needs_input_grad[3], need_weight=ctx.needs_input_grad[4]
        )
        return *gradients, None, None, None


class BlockedCall:
    """The computation of one attention call, with inputs in compute precision, and its tiles.

    Args:
        q_BHTE, k_BHSE, v_BHSE: The inputs, in any floating dtype. The results have the same dtype.
        bias_HS: The bias b at distances 0 ... S-1. Its dtype is the compute precision.
        weight_HS: The factor w at distances 0 ... S-1, or None if w is 1 everywhere.
        scale: The factor of the query-key products, usually 1/sqrt(head size).
        dropout_p: The probability of dropping a softmax weight.
        seed: The seed of the dropout mask.
    """

    def __init__(
        self,
        q_BHTE: Tensor,
        k_BHSE: Tensor,
        v_BHSE: Tensor,
        bias_HS: Tensor,
        weight_HS: Tensor | None,
        scale: float,
        dropout_p: float,
        seed: int,
    ):
        self.B, self.H, self.T, self.E = q_BHTE.shape
        self.S = k_BHSE.shape[2]
        self.out_dtype, self.dtype = q_BHTE.dtype, bias_HS.dtype
        self.scale, self.keep, self.seed = scale, 1.0 - dropout_p, seed
        self.rows = block_rows(self.T, self.S)
        self.tiles = list(walk(self.B, self.H, self.T, self.S))
        self.q_NTE = self._flat(q_BHTE).flip(1)
        self.k_NSE = self._flat(k_BHSE)
        self.v_NSE = self._flat(v_BHSE)
        self.bias = DistanceVector(bias_HS, self.rows, -torch.inf)
        self.weight = None if weight_HS is None else DistanceVector(weight_HS, self.rows, 1.0)

    def _flat(self, x_BHXE: Tensor) -> Tensor:
        return x_BHXE.to(self.dtype).reshape(self.B * self.H, -1, self.E).contiguous()

    def _unflat(self, x_NXE: Tensor) -> Tensor:
        return x_NXE.view(self.B, self.H, -1, self.E).to(self.out_dtype)

    def new_kept(self) -> Tensor | None:
        """Return a buffer to keep the attention probabilities of all tiles for the backward pass.

        Return None if they are not kept. They are kept only if they are small and the distance
        kernel has no factor. With a factor, the backward pass computes the query-key products
        again in any case, and the probabilities with them.
        """
        size = self.tiles[-1].start + self.tiles[-1].size
        if self.weight is not None or size > KEPT_SHARE * 4 * self.q_NTE.numel():
            return None
        return self.q_NTE.new_empty(size)

    def allocate(self, count: int) -> list[Tensor]:
        """Return `count` flat buffers, each large enough for any tile's scores.

        This also allocates `self.scratch`, the memory for the results of `product`.
        """
        items = max(tile.batch * tile.num_heads for tile in self.tiles)
        self.scratch = self.q_NTE.new_empty(items * self.S * self.E)
        size = max(tile.size for tile in self.tiles)
        return [self.q_NTE.new_empty(size) for _ in range(count)]

    def views(self, tile: QueryTile, buffers: list[Tensor], kept: Tensor | None) -> list[Tensor]:
        """Return contiguous views [sequences * heads, rows, keys] of memory for this tile's scores.

        There is one view for each tensor of `buffers`. If `kept` is not None, a view of `kept`
        comes before these. The first view is for the attention probabilities.
        """
        shape = tile.batch * tile.num_heads, tile.num_rows, tile.keys
        found = [buffer[: tile.size].view(shape) for buffer in buffers]
        if kept is not None:
            found.insert(0, kept[tile.start : tile.start + tile.size].view(shape))
        return found

    def product(self, a_mXY: Tensor, b_mYE: Tensor) -> Tensor:
        """Return the batched matrix product of `a_mXY` [m, X, Y] and `b_mYE` [m, Y, E].

        The next call overwrites the result. The result is contiguous, because a batched product
        into contiguous memory is several times faster than a product into a slice.
        """
        shape = a_mXY.shape[0], a_mXY.shape[1], self.E
        out_mXE = self.scratch[: shape[0] * shape[1] * shape[2]].view(shape)
        return torch.bmm(a_mXY, b_mYE, out=out_mXE)

    def probabilities(self, tile: QueryTile, out_mRn: Tensor, raw_mRn: Tensor | None) -> None:
        """Write the attention probabilities of a tile into `out_mRn`.

        If there is a factor w, also write the scaled query-key products into `raw_mRn`.
        """
        q_mRE = self.q_NTE[tile.items, tile.rows]
        k_mEn = self.k_NSE[tile.items, : tile.keys].mT
        bias_HRn = self.bias.block(tile.heads, tile.num_rows, tile.keys)
        out_BHRn = out_mRn.view(tile.shape)
        if raw_mRn is None:
            out_BHRn.copy_(bias_HRn)
            out_mRn.baddbmm_(q_mRE, k_mEn, alpha=self.scale)
        else:
            assert self.weight is not None
            weight_HRn = self.weight.block(tile.heads, tile.num_rows, tile.keys)
            torch.baddbmm(raw_mRn, q_mRE, k_mEn, beta=0.0, alpha=self.scale, out=raw_mRn)
            torch.addcmul(bias_HRn, raw_mRn.view(tile.shape), weight_HRn, out=out_BHRn)
        # This can be done in place, because each row is read before it is written.
        torch.softmax(out_mRn, dim=-1, out=out_mRn)

    def dropout_mask(self, tile: QueryTile, out_mRn: Tensor) -> Tensor:
        """Write this tile's dropout mask of ones and zeros into `out_mRn`, and return it.

        The mask depends only on the seed and the tile, so every call for a tile gives the same
        mask.
        """
        generator = torch.Generator(out_mRn.device).manual_seed(self.seed + tile.index)
        return out_mRn.bernoulli_(self.keep, generator=generator)

    def forward(self, kept: Tensor | None) -> Tensor:
        """Return the attention output [batch, heads, queries, head size] in the inputs' dtype.

        If `kept` is not None, the probabilities are stored there for the backward pass.
        """
        out_NTE = torch.empty_like(self.q_NTE)
        dropping, weighted = self.keep < 1.0, self.weight is not None
        buffers = self.allocate((kept is None) + (dropping or weighted))
        for tile in self.tiles:
            probs_mRn, *more = self.views(tile, buffers, kept)
            self.probabilities(tile, probs_mRn, more[0] if weighted else None)
            if dropping:
                probs_mRn = self.dropout_mask(tile, more[-1]).mul_(probs_mRn)
            out_mRE = self.product(probs_mRn, self.v_NSE[tile.items, : tile.keys])
            torch.div(out_mRE, self.keep, out=out_NTE[tile.items, tile.rows])
        return self._unflat(out_NTE.flip(1))

    def backward(
        self, grad_BHTE: Tensor, kept: Tensor | None, *, need_bias: bool, need_weight: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, the bias and the factor.

        The gradients of q, k and v have the inputs' dtype. The gradients of the bias and
        the factor are [heads, distances] in compute precision. The gradient of the bias is None if
        `need_bias` is false, and that of the factor is None if `need_weight` is false.
        """
        grad_NTE = self._flat(grad_BHTE).flip(1)
        if self.keep < 1.0:
            grad_NTE /= self.keep
        dq_NTE = torch.empty_like(self.q_NTE)
        dk_NSE, dv_NSE = torch.zeros_like(self.k_NSE), torch.zeros_like(self.v_NSE)
        db_HS = self.q_NTE.new_zeros(self.H, self.S) if need_bias else None
        dw_HS = self.q_NTE.new_zeros(self.H, self.S) if need_weight else None
        dropping = self.keep < 1.0
        buffers = self.allocate((kept is None) + 1 + dropping + (self.weight is not None))
        for tile in self.tiles:
            seen = slice(0, tile.keys)
            q_mRE, grad_mRE = self.q_NTE[tile.items, tile.rows], grad_NTE[tile.items, tile.rows]
            k_mnE, v_mnE = self.k_NSE[tile.items, seen], self.v_NSE[tile.items, seen]
            dk_mnE, dv_mnE = dk_NSE[tile.items, seen], dv_NSE[tile.items, seen]
            probs_mRn, ds_mRn, *more = self.views(tile, buffers, kept)
            raw_mRn = more[0] if self.weight is not None else None
            if kept is None:
                self.probabilities(tile, probs_mRn, raw_mRn)
            if dropping:
                mask_mRn = self.dropout_mask(tile, more[-1])
                torch.mul(probs_mRn, mask_mRn, out=ds_mRn)
                dv_mnE += self.product(ds_mRn.mT, grad_mRE)
                torch.bmm(grad_mRE, v_mnE.mT, out=ds_mRn)
                ds_mRn *= mask_mRn
            else:
                dv_mnE += self.product(probs_mRn.mT, grad_mRE)
                torch.bmm(grad_mRE, v_mnE.mT, out=ds_mRn)
            # Compute dS in place, which is possible because it is computed row by row.
            torch.ops.aten._softmax_backward_data(
                ds_mRn, probs_mRn, -1, self.dtype, grad_input=ds_mRn
            )
            if db_HS is not None:
                add_diagonal_sums(db_HS[tile.heads], ds_mRn.view(tile.shape))
            if self.weight is not None and raw_mRn is not None:
                if dw_HS is not None:
                    raw_mRn *= ds_mRn
                    add_diagonal_sums(dw_HS[tile.heads], raw_mRn.view(tile.shape))
                ds_BHRn = ds_mRn.view(tile.shape)
                ds_BHRn *= self.weight.block(tile.heads, tile.num_rows, tile.keys)
            dq_mRE = self.product(ds_mRn, k_mnE)
            torch.mul(dq_mRE, self.scale, out=dq_NTE[tile.items, tile.rows])
            dk_mnE.add_(self.product(ds_mRn.mT, q_mRE), alpha=self.scale)
        gradients = (self._unflat(x) for x in (dq_NTE.flip(1), dk_NSE, dv_NSE))
        return *gradients, *(None if x is None else x.flip(1) for x in (db_HS, dw_HS))


BACKEND = Backend("blocked", blocked, remark=lambda request: "no quadratic buffer")
