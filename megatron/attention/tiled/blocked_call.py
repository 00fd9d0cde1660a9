"""Compute one call of blocked attention tile by tile, forward and backward.

Legend and formulas: see `blocked`. The T axis is in reversed order.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.attention.tiled.decay_and_sink import Decay, NullKey, softmax
from megatron.attention.tiled.row_bias import RowBias
from megatron.attention.tiled.tiles import QueryTile, block_rows, walk
from megatron.attention.tiled.toeplitz import DistanceVector, add_diagonal_sums

KEPT_SHARE = 1.5
"""The probabilities P are kept for the backward pass only if P has at most KEPT_SHARE times as many
elements as q, k, v and the output together. Sequences of up to about 10 times the head size meet
this condition. Therefore memory stays linear in T."""


class BlockedCall:
    """One attention call, computed tile by tile on the CPU.

    B is the batch size, H is the number of heads, T is the number of queries, S is the number of
    keys, and E is the head size.

    Args:
        q_BHTE, k_BHSE, v_BHSE: The queries, the keys and the values, in any floating dtype.
        bias_HS: The bias of the logits at distances 0 ... S-1. Its dtype is the dtype of all
            computations.
        weight_HS: The factor of the query-key products at distances 0 ... S-1. None means 1.
        decay_BHS: The sum c of all log-decays up to each position, or None. c_i - c_j is added to
            the logit of query i and key j.
        sink_H: The logit of each head's attention sink. None without a sink.
        starts_BT: The first key of each query's document. The last query comes first. None if each
            sequence is one document.
        seed: The seed of the dropout mask. None without dropout.
        scale: The number that multiplies the query-key products, usually 1/sqrt(E).
        dropout_p: The probability of dropping a softmax weight.
        window: The largest distance at which a query sees a key, or None. `bias_HS` must be -inf at
            larger distances.
        row_bias: A bias that depends on the query's position, or None.
    """

    def __init__(
        self,
        q_BHTE: Tensor,
        k_BHSE: Tensor,
        v_BHSE: Tensor,
        bias_HS: Tensor,
        weight_HS: Tensor | None,
        decay_BHS: Tensor | None,
        sink_H: Tensor | None,
        starts_BT: Tensor | None,
        seed: Tensor | None,
        scale: float,
        dropout_p: float,
        window: int | None,
        row_bias: RowBias | None = None,
    ):
        self.B, self.H, self.T, self.E = q_BHTE.shape
        self.S = k_BHSE.shape[2]
        self.out_dtype, self.dtype = q_BHTE.dtype, bias_HS.dtype
        self.scale, self.keep = scale, 1.0 - dropout_p
        no_values = q_BHTE.is_meta  # a plan: one document has the most scores
        self.seed = 0 if seed is None or no_values else int(seed)
        self.rows = block_rows(self.T, self.S)
        self.starts_BT = starts_BT
        starts = None if starts_BT is None or no_values else starts_BT.tolist()
        self.tiles = list(walk(self.B, self.H, self.T, self.S, starts, window))
        self.q_NTE = self._flat(q_BHTE).flip(1)
        self.k_NSE = self._flat(k_BHSE)
        self.v_NSE = self._flat(v_BHSE)
        self.bias = DistanceVector(bias_HS, self.rows, -torch.inf)
        self.weight = None if weight_HS is None else DistanceVector(weight_HS, self.rows, 1.0)
        self.decay = None if decay_BHS is None else Decay(decay_BHS, self.dtype)
        self.sink = None if sink_H is None else NullKey(sink_H, self.q_NTE, self.decay)
        self.row_bias = row_bias
        self.lse_NT: Tensor | None = None
        self.dlse_NT: Tensor | None = None

    def _flat(self, x_BHXE: Tensor) -> Tensor:
        return x_BHXE.to(self.dtype).reshape(self.B * self.H, -1, self.E).contiguous()

    def _unflat(self, x_NXE: Tensor) -> Tensor:
        return x_NXE.view(self.B, self.H, -1, self.E).to(self.out_dtype)

    def new_kept(self) -> Tensor | None:
        """Return a buffer for the attention probabilities, or None if it is too large."""
        # With a factor w, the backward pass computes the query-key products again anyway. With a
        # sink, it also needs the sink's softmax weights.
        size, plain = self.tiles[-1].start + self.tiles[-1].size, (self.weight or self.sink) is None
        small = size <= KEPT_SHARE * 4 * self.q_NTE.numel()
        return self.q_NTE.new_empty(size) if plain and small else None

    def allocate(self, count: int) -> list[Tensor]:
        """Allocate buffers, each large enough for the scores of any tile."""
        most = max(tile.batch * tile.num_heads * tile.keys for tile in self.tiles)
        # For the results of `product`.
        self.scratch = self.q_NTE.new_empty(most * self.E)
        size = max(tile.size for tile in self.tiles)
        return [self.q_NTE.new_empty(size) for _ in range(count)]

    def views(self, tile: QueryTile, buffers: list[Tensor], kept: Tensor | None) -> list[Tensor]:
        """Return views of the buffers in the shape of a tile's scores.

        If `kept` is given, the first view is the tile's part of `kept`.

        Args:
            tile: The tile.
            buffers: The buffers from `allocate`.
            kept: The buffer from `new_kept`, or None.
        """
        shape = tile.batch * tile.num_heads, tile.num_rows, tile.keys
        found = [buffer[: tile.size].view(shape) for buffer in buffers]
        if kept is not None:
            found.insert(0, kept[tile.start : tile.start + tile.size].view(shape))
        return found

    def product(self, a_mXY: Tensor, b_mYE: Tensor) -> Tensor:
        """Return a batched matrix product. The next call overwrites the result."""
        shape = a_mXY.shape[0], a_mXY.shape[1], self.E
        # a product into contiguous memory is several times faster than a product into a slice
        out_mXE = self.scratch[: shape[0] * shape[1] * shape[2]].view(shape)
        return torch.bmm(a_mXY, b_mYE, out=out_mXE)

    def probabilities(self, tile: QueryTile, out_mRn: Tensor, raw_mRn: Tensor | None) -> None:
        """Write the attention probabilities of a tile into a buffer.

        Args:
            tile: The tile.
            out_mRn: The buffer for the probabilities.
            raw_mRn: A buffer for the scaled query-key products before the factor w, which the
                backward pass needs. None if there is no factor w.
        """
        q_mRE = self.q_NTE[tile.items, tile.rows]
        k_mEn = self.k_NSE[tile.items, tile.seen].mT
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
        if self.row_bias is not None:
            self.row_bias.add_to(tile, out_BHRn)
        if self.decay is not None:
            out_mRn -= self.decay.of_keys(tile)
        if tile.mixed and self.starts_BT is not None:
            key_n = torch.arange(tile.seen.start, tile.seen.stop, device=out_mRn.device)
            starts_R = self.starts_BT[tile.items.start // self.H, tile.rows]
            out_mRn.masked_fill_(key_n < starts_R[:, None], -torch.inf)
        if self.sink is not None:
            lse_mR = self.sink.softmax(tile, out_mRn)
        elif self.lse_NT is not None:
            lse_mR = softmax(out_mRn)
        else:  # this can be done in place, because each row is read before it is written
            torch.softmax(out_mRn, dim=-1, out=out_mRn)
            return
        if self.lse_NT is not None:
            lse_mR = lse_mR if self.decay is None else lse_mR + self.decay.of_rows(tile)
            self.lse_NT[tile.items, tile.rows] = lse_mR

    def dropout_mask(self, tile: QueryTile, out_mRn: Tensor) -> Tensor:
        """Write a tile's dropout mask of ones and zeros into a buffer, and return it."""
        if out_mRn.is_meta:
            return out_mRn.bernoulli_(self.keep)
        # So the mask depends only on the seed and the tile.
        generator = torch.Generator(out_mRn.device).manual_seed(self.seed + tile.index)
        return out_mRn.bernoulli_(self.keep, generator=generator)

    def forward(self, kept: Tensor | None, *, return_lse: bool = False) -> Any:
        """Return the attention output [batch, heads, queries, head size] in the inputs' dtype.

        Args:
            kept: A buffer in which to store the attention probabilities, or None.
            return_lse: Whether to return (output, lse). lse is the log-sum-exp of each softmax.
        """
        if return_lse:
            self.lse_NT = torch.empty_like(self.q_NTE[..., 0])
        out_NTE = torch.empty_like(self.q_NTE)
        dropping, weighted = self.keep < 1.0, self.weight is not None
        buffers = self.allocate((kept is None) + (dropping or weighted))
        for tile in self.tiles:
            probs_mRn, *more = self.views(tile, buffers, kept)
            self.probabilities(tile, probs_mRn, more[0] if weighted else None)
            if dropping:
                probs_mRn = self.dropout_mask(tile, more[-1]).mul_(probs_mRn)
            out_mRE = self.product(probs_mRn, self.v_NSE[tile.items, tile.seen])
            torch.div(out_mRE, self.keep, out=out_NTE[tile.items, tile.rows])
        out_BHTE = self._unflat(out_NTE.flip(1))
        if self.lse_NT is None:
            return out_BHTE
        return out_BHTE, self.lse_NT.flip(1).view(self.B, self.H, self.T)

    def backward(
        self, grad_BHTE: Tensor, kept: Tensor | None, *, need_bias: bool, need_weight: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs. The gradient of an absent input is None.

        The order is q, k, v, bias, weight, decay, sink, and the parameters of `row_bias`.

        Args:
            grad_BHTE: The gradient of the output [batch, heads, queries, head size].
            kept: The attention probabilities that `self.forward` stored, or None.
            need_bias: Whether to compute the gradient of the bias.
            need_weight: Whether to compute the gradient of the weight.
        """
        grad_NTE = self._flat(grad_BHTE).flip(1)
        if self.keep < 1.0:
            grad_NTE /= self.keep
        dq_NTE = torch.empty_like(self.q_NTE)
        dk_NSE, dv_NSE = torch.zeros_like(self.k_NSE), torch.zeros_like(self.v_NSE)
        db_HS = self.q_NTE.new_zeros(self.H, self.S) if need_bias else None
        dw_HS = self.q_NTE.new_zeros(self.H, self.S) if need_weight else None
        dropping, spare = self.keep < 1.0, self.keep < 1.0 or self.sink is not None
        buffers = self.allocate((kept is None) + 1 + spare + (self.weight is not None))
        for tile in self.tiles:
            seen = tile.seen
            q_mRE, grad_mRE = self.q_NTE[tile.items, tile.rows], grad_NTE[tile.items, tile.rows]
            k_mnE, v_mnE = self.k_NSE[tile.items, seen], self.v_NSE[tile.items, seen]
            dk_mnE, dv_mnE = dk_NSE[tile.items, seen], dv_NSE[tile.items, seen]
            probs_mRn, ds_mRn, *more = self.views(tile, buffers, kept)
            raw_mRn = more[0] if self.weight is not None else None
            if kept is None:
                self.probabilities(tile, probs_mRn, raw_mRn)
            mask_mRn = self.dropout_mask(tile, more[-1]) if dropping else None
            weights = probs_mRn if mask_mRn is None else torch.mul(probs_mRn, mask_mRn, out=ds_mRn)
            dv_mnE += self.product(weights.mT, grad_mRE)
            torch.bmm(grad_mRE, v_mnE.mT, out=ds_mRn)
            if mask_mRn is not None:
                ds_mRn *= mask_mRn
            self._softmax_backward(tile, probs_mRn, ds_mRn, *more)
            if db_HS is not None:
                add_diagonal_sums(db_HS[tile.heads], ds_mRn.view(tile.shape))
            if self.row_bias is not None:
                self.row_bias.add_gradient(tile, ds_mRn.view(tile.shape))
            if self.decay is not None:
                self.decay.add_gradient(tile, ds_mRn)
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
        kernel = (None if x is None else x.flip(1) for x in (db_HS, dw_HS))
        return *gradients, *kernel, *self._gradients_of_terms()

    def _softmax_backward(
        self, tile: QueryTile, probs_mRn: Tensor, ds_mRn: Tensor, *more: Tensor
    ) -> None:
        """Convert the gradient of a tile's probabilities to the gradient of its scores.

        Args:
            tile: The tile.
            probs_mRn: The probabilities.
            ds_mRn: The gradient of the probabilities, which is overwritten by the result.
            more: Other buffers. If there is a sink, the last of them is overwritten.
        """
        dlse_mR = None if self.dlse_NT is None else self.dlse_NT[tile.items, tile.rows]
        if self.sink is not None:
            self.sink.add_gradient(tile, probs_mRn, ds_mRn, more[-1], dlse_mR)
        # Compute dS in place, which is possible because it is computed row by row.
        torch.ops.aten._softmax_backward_data(ds_mRn, probs_mRn, -1, self.dtype, grad_input=ds_mRn)
        if dlse_mR is not None:
            ds_mRn.addcmul_(probs_mRn, dlse_mR[..., None])

    def _gradients_of_terms(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the decay, the sink and the parameters of `row_bias`."""
        dc_BHS = ds_H = None
        if self.decay is not None:
            if self.dlse_NT is not None:
                self.decay.grad_NS[:, self.S - self.T :] += self.dlse_NT.flip(1)
            dc_BHS = self.decay.grad_NS.view(self.B, self.H, self.S)
        if self.sink is not None:
            dz_BHT = self.sink.grad_NT.view(self.B, self.H, self.T).flip(2)
            ds_H = dz_BHT.sum((0, 2))
            if dc_BHS is not None:
                dc_BHS[:, :, self.S - self.T :] -= dz_BHT
        return dc_BHS, ds_H, None if self.row_bias is None else self.row_bias.grad_HN
