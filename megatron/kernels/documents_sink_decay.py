"""Define what the Triton kernels compute for documents, windows, decay, sinks and positions.

    y_ij = s_ij w(d) + b(d, i) / scale - (c_j - c_r) / scale     first_i <= j <= query_offset + i

First keys: documents and a window hide the keys before first_i from row i. first_i never falls from
a row to the next. So the keys that a tile of rows sees are contiguous, and so are the rows that see
a tile of keys. Tiles outside these ranges are skipped. Among the other tiles, only those that
contain the first key of one of their rows need a mask because of first keys.

Decay: c_j is the sum of log forget gates up to position j, so it is large in a long sequence. To
keep the digits of differences, c / scale is given in two fp32 parts, `high` + `low`. c_r is the
decay of row r, the first row of the block of `BLOCK` rows that contains row i. The softmax of row i
is the same with c_r in place of c_i. lse is also computed with c_r.

Sink: a null key with a value of 0 takes part in the softmax. For row i, its y is sink / scale minus
(c_i - c_r) / scale.

Positions: the position of each row in its document, for biases that depend on it.

If a call lacks one of these terms, all arguments of the term are None, and no code is generated.

Legend: see `forward`.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(128)
"""The number of rows that share c_r, their reference for the decay. A multiple of each tile's M."""
# The compiler computes 2^(c y - c top) with c y exact and c top rounded. For y = top = -1e10 that
# may be 2^300 instead of 1. So a row would become NaN if a tile had such y alone.
LEAST = tl.constexpr(-1e9)
"""The initial running maximum of a row. It is finite, because -inf - (-inf) is NaN."""


@triton.jit
def both(seen, limit):
    """Return the mask `seen & limit`, or `seen` if `limit` is None."""
    return seen if limit is None else seen & limit


@triton.jit
def row_tiles(end_ptr, n0, offset, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """Return which tiles of M query rows see the keys n0 ... n0 + N - 1, and which need a mask.

    A tile needs a mask if one of its rows does not see all N keys. The last tile also needs a mask
    if it has fewer than M rows.

    Args:
        end_ptr: Points to one row index for each key. Documents and windows hide the key from this
            row and all later rows. None without documents and windows.

    Returns:
        (first, whole, full, crossing, masked, rest). The tiles from row `whole` up to row `full`
        (excluded) need no mask. `masked` is the number of tiles that need a mask. The first
        `crossing` of them begin at row `first`, and the others begin at row `rest`.
    """
    first = tl.maximum(n0 - offset, 0) // M * M
    whole = tl.minimum(tl.cdiv(tl.maximum(n0 + N - 1 - offset, 0), M), tl.cdiv(queries, M)) * M
    full = queries // M * M
    if end_ptr is None:
        crossing = tl.maximum(whole - first, 0) // M
        masked = crossing + tl.where((full < queries) & (full >= whole), 1, 0)
        rest = full
    else:
        stop = tl.cdiv(tl.load(end_ptr + tl.minimum(n0 + N, keys) - 1), M) * M
        full = tl.load(end_ptr + n0) // M * M
        crossing = tl.maximum(tl.minimum(whole, stop) - first, 0) // M
        rest = tl.maximum(full, whole)
        masked = crossing + tl.maximum(stop - rest, 0) // M
    return first, whole, full, crossing, masked, rest


@triton.jit
def row_tile_at(tile, crossing, first, rest, end, M: tl.constexpr):
    """Return the first row of one of the tiles (M query rows) that need a mask.

    Args:
        tile: The number of the tile among those that need a mask, counted from 0.
        crossing, first, rest: Results of `row_tiles`.
        end: None without documents and windows. At most one tile then begins at `rest` or later.
    """
    if end is not None:
        rest += (tile - crossing) * M
    return tl.where(tile < crossing, first + tile * M, rest)


@triton.jit
def open_decay(high_ptr, low_ptr, item, reference, keys):
    """Return (high, low, high_r, low_r), which describe the decay of one head of one sequence.

    The decay divided by scale is stored as the sum of two fp32 vectors, a high and a low part.
    `high` and `low` point to the head's first entries. `high_r` and `low_r` are the entries at
    `reference`.

    Args:
        item: The index of the head in the flattened dimension of sequences and heads.
        reference: A position or a tensor of positions.
        keys: The number of keys, which is the length of each vector.
    """
    high, low = high_ptr + item.to(tl.int64) * keys, low_ptr + item.to(tl.int64) * keys
    return high, low, tl.load(high + reference), tl.load(low + reference)


@triton.jit
def lost_at(decay, at):
    """Return (c_j - c_r) / scale for several positions j, where c is the decay of one head.

    Args:
        decay: The result of `open_decay` with the argument `reference` = r.
        at: The positions j.
    """
    return (tl.load(decay[0] + at) - decay[2]) + (tl.load(decay[1] + at) - decay[3])


@triton.jit
def lost(decay, first, limit, MASKED: tl.constexpr, N: tl.constexpr):
    """Return (c_j - c_r) / scale for N positions j, where c is the decay of one head.

    Args:
        decay: The result of `open_decay` with the argument `reference` = r.
        first: The first of the positions j.
        limit: With MASKED, positions from `limit` on get the value of the position `limit` - 1.
    """
    at = first + tl.arange(0, N)
    return lost_at(decay, tl.minimum(at, limit - 1) if MASKED else at)


@triton.jit
def load_clamped(base, first, limit, N: tl.constexpr):
    """Load N entries of the vector at `base`, from index `first` on.

    Indices from `limit` on are replaced by limit - 1.
    """
    return tl.load(base + tl.minimum(first + tl.arange(0, N), limit - 1))


@triton.jit
def lost_by(decay, reference):
    """Return (c_j - c_r) / scale for several positions j, where c is the decay of one head.

    Args:
        decay: The result of `open_decay` with the positions j as the argument `reference`.
        reference: The position r.
    """
    high, low = tl.load(decay[0] + reference), tl.load(decay[1] + reference)
    return (decay[2] - high) + (decay[3] - low)


@triton.jit
def null_score(sink_ptr, decay, m0, offset, keys, M: tl.constexpr):
    """Return the null key's logit, divided by scale, for the M query rows from `m0` on.

    The null key is an additional key in each softmax. For query row i, its logit is the sink minus
    c_i - c_r, where c is the decay. Without a decay, its logit is the sink.

    Args:
        decay: The result of `open_decay` with the argument `reference` = r, or empty without a
            decay.
    """
    y = tl.zeros([M], dtype=tl.float32) + tl.load(sink_ptr)
    if len(decay):
        y -= lost(decay, offset + m0, keys, True, M)
    return y


def since_reference(decay_BHS: Tensor, offset: int) -> Tensor:
    """Return c_i - c_r [batch, heads, queries] in fp32, where c is the decay.

    i is a query row. r is the first row of the block of `BLOCK` rows that contains i.

    Args:
        decay_BHS: The decay c of each position [batch, heads, keys].
        offset: The position of the first query.
    """
    c_BHT = decay_BHS[:, :, offset:].double()
    rows = torch.arange(c_BHT.shape[-1], device=c_BHT.device)
    return (c_BHT - c_BHT[:, :, rows // BLOCK.value * BLOCK.value]).float()


TENSORS = ("first", "end", "sink", "high", "low", "ddecay", "position")
"""The names of the tensors that Triton kernels read or write for these terms."""


@dataclass(frozen=True)
class Terms:
    """The inputs of an attention call beside q, k, v, bias and factor. Each may be None.

    Attributes:
        first_BT: The first key that each query sees, [batch, queries] int32, contiguous.
        sink_H: The logit of each head's null key, an additional key of each softmax with the value
            0.
        decay_BHS: The decay c of each position, in fp64 or fp32. c_i - c_j is added to the logit of
            query i and key j.
        position_BT: The position of each query in its document, int32, contiguous.
    """

    first_BT: Tensor | None = None
    sink_H: Tensor | None = None
    decay_BHS: Tensor | None = None
    position_BT: Tensor | None = None

    @property
    def cost_registers(self) -> bool:
        """Whether there are terms for which a Triton kernel needs many registers.

        These are all terms but `position_BT`.
        """
        return not (self.first_BT is None and self.sink_H is None and self.decay_BHS is None)

    def tensors(self, scale: float) -> dict[str, Tensor]:
        """Return a dict of the tensors that all Triton kernels read for these terms.

        `sink` is divided by `scale`. The decay, divided by `scale`, is the sum of `high` and `low`,
        both fp32. `first` and `position` are as in the attributes. Absent terms are left out.
        """
        given = {"first": self.first_BT, "position": self.position_BT}
        found = {name: x for name, x in given.items() if x is not None}
        if self.sink_H is not None:
            found["sink"] = (self.sink_H.float() / scale).contiguous()
        if self.decay_BHS is not None:
            scaled = self.decay_BHS.contiguous().double() / scale
            found["high"] = scaled.float()
            found["low"] = (scaled - found["high"]).float()
        return found

    def of_keys(self, keys: int) -> dict[str, Tensor]:
        """Return a dict of the tensors that only the Triton kernel `key_pass` needs.

        If documents or a window hide keys, `end` [batch, keys] contains one row index for each key.
        From this query row on, the key is hidden. If the key is never hidden, the index is the
        number of queries.

        If there is a decay, `ddecay` is a new tensor. `key_pass` writes the gradient of the decay
        into it.

        Args:
            keys: The number of keys, which is the length of `end`.
        """
        found = {}
        if self.first_BT is not None:
            key = torch.arange(keys, dtype=torch.int32, device=self.first_BT.device)
            key = key.expand(len(self.first_BT), -1).contiguous()
            found["end"] = torch.searchsorted(self.first_BT, key, right=True, out_int32=True)
        if self.decay_BHS is not None:
            shape, device = self.decay_BHS.shape, self.decay_BHS.device
            found["ddecay"] = torch.empty(shape, dtype=torch.float32, device=device)
        return found

    def gradients(
        self, lse_BHT: Tensor, delta_BHT: Tensor, ddecay_BHS: Tensor | None, offset: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the sink and of the decay, or None for an absent term.

        The gradient of the null key's logit is -p delta for each query. p is the softmax weight of
        the null key. delta is the dot product of the query's output and the gradient of this
        output. The sink's gradient is the sum of -p delta over all queries. The null key's logit is
        the sink minus the decay at the query's position (see `null_score`). Therefore p delta is
        added to the decay's gradient at this position.

        Args:
            ddecay_BHS: The decay's gradient without p delta, which is added in place.
            offset: The position of the first query. The first key has the position 0.
        """
        if self.sink_H is None:
            return None, ddecay_BHS
        null_BHT = self.sink_H.float()[:, None]
        if self.decay_BHS is not None:
            null_BHT = null_BHT - since_reference(self.decay_BHS, offset)
        lost_BHT = torch.exp2(null_BHT / math.log(2.0) - lse_BHT) * delta_BHT
        if ddecay_BHS is not None:
            ddecay_BHS[:, :, offset:] += lost_BHT
        return -lost_BHT.sum((0, 2)), ddecay_BHS


NO_TERMS = Terms()
