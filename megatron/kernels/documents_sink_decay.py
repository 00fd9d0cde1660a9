"""Define what the Triton kernels compute for documents, windows, decay, sinks and positions.

    y_ij = s_ij w(d) + b(d, i) / scale - (c_j - c_r) / scale     first_i <= j <= query_offset + i

First keys: documents and a window hide the keys before first_i from row i. first_i never decreases
from a row to the next row. So the keys that a tile of rows sees are contiguous. The rows that see a
tile of keys are also contiguous. Tiles outside these ranges are skipped. Among the other tiles,
first keys require a mask only in tiles that contain the first key of one of their rows.

Decay: c_j is the sum of log forget gates up to position j, so it is large in a long sequence. To
keep the digits of differences of c, c / scale is stored as a sum of two fp32 numbers, `high` +
`low`. c_r is the decay of row r, the first row of the block of `BLOCK` rows that contains row i.
The softmax of row i is the same with c_r in place of c_i. lse is also computed with c_r.

Sink: a null key with a value of 0 takes part in the softmax. For row i, the null key's y is (sink +
c_r - c_i) / scale.

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
    """Return the intersection of two masks, of which the second may be None."""
    return seen if limit is None else seen & limit


@triton.jit
def row_tiles(end_ptr, n0, offset, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """Return which tiles of query rows see a tile of keys, and which of them need a mask.

    The result is (first, whole, full, crossing, masked, rest). The tiles from row `whole` to row
    `full` (excluded) need no mask. `masked` is the number of tiles that need a mask, because a row
    does not see all N keys or because there are fewer than M rows. The first `crossing` of these
    tiles begin at row `first`. The others begin at row `rest`.
    """
    first = tl.maximum(n0 - offset, 0) // M * M
    whole = tl.minimum(tl.cdiv(tl.maximum(n0 + N - 1 - offset, 0), M), tl.cdiv(queries, M)) * M
    full = queries // M * M
    if end_ptr is None:
        crossing = tl.maximum(whole - first, 0) // M
        masked = crossing + tl.where((full < queries) & (full >= whole), 1, 0)
        rest = full
    else:
        # At `end_ptr` is, for each key, the first row from which documents and windows hide it.
        stop = tl.cdiv(tl.load(end_ptr + tl.minimum(n0 + N, keys) - 1), M) * M
        full = tl.load(end_ptr + n0) // M * M
        crossing = tl.maximum(tl.minimum(whole, stop) - first, 0) // M
        rest = tl.maximum(full, whole)
        masked = crossing + tl.maximum(stop - rest, 0) // M
    return first, whole, full, crossing, masked, rest


@triton.jit
def row_tile_at(tile, crossing, first, rest, end, M: tl.constexpr):
    """Return the first row of a tile of query rows that needs a mask.

    `tile` is the number of this tile among all tiles that need a mask. `crossing`, `first` and
    `rest` are results of `row_tiles`.
    """
    # Without documents and windows (`end` is None), at most one of these tiles begins at `rest` or
    # later.
    if end is not None:
        rest += (tile - crossing) * M
    return tl.where(tile < crossing, first + tile * M, rest)


@triton.jit
def open_decay(high_ptr, low_ptr, item, reference, keys):
    """Load the decay of one head at a reference position, in order to subtract it later."""
    # Decay / scale is the sum of two fp32 vectors, high + low. `item` is the index of the head in
    # the flattened dimension of sequences and heads. `reference` is a position, or a tensor of
    # positions.
    high, low = high_ptr + item.to(tl.int64) * keys, low_ptr + item.to(tl.int64) * keys
    return high, low, tl.load(high + reference), tl.load(low + reference)


@triton.jit
def lost_at(decay, at):
    """Return how much the decay lowers the logits of the keys at positions `at`.

    The result is divided by scale.
    """
    # (c_j - c_r) / scale for j in `at`, where r is the reference position of `open_decay`.
    return (tl.load(decay[0] + at) - decay[2]) + (tl.load(decay[1] + at) - decay[3])


@triton.jit
def lost(decay, first, limit, MASKED: tl.constexpr, N: tl.constexpr):
    """Return how much the decay lowers the logits of N successive keys.

    The result is divided by scale.
    """
    # (c_j - c_r) / scale, where r is the reference position of `open_decay`.
    at = first + tl.arange(0, N)
    return lost_at(decay, tl.minimum(at, limit - 1) if MASKED else at)


@triton.jit
def load_clamped(base, first, limit, N: tl.constexpr):
    """Load N successive entries of a vector. Indices from `limit` on become limit - 1."""
    return tl.load(base + tl.minimum(first + tl.arange(0, N), limit - 1))


@triton.jit
def lost_by(decay, reference):
    """Return (c_j - c_r) / scale, which the decay subtracts from y, for several keys j.

    `decay` comes from `open_decay`, which got the positions j. `reference` is the position r.
    """
    high, low = tl.load(decay[0] + reference), tl.load(decay[1] + reference)
    return (decay[2] - high) + (decay[3] - low)


@triton.jit
def null_score(sink_ptr, decay, m0, offset, keys, M: tl.constexpr):
    """Return the logit of an attention sink, divided by scale, for several query rows."""
    # Divided by scale. For row i, the decay lowers the sink's logit by c_i - c_r.
    y = tl.zeros([M], dtype=tl.float32) + tl.load(sink_ptr)
    if len(decay):
        y -= lost(decay, offset + m0, keys, True, M)
    return y


def since_reference(decay_BHS: Tensor, offset: int) -> Tensor:
    """Return the decay at each query, minus the decay at the first query of the same block."""
    c_BHT = decay_BHS[:, :, offset:].double()
    rows = torch.arange(c_BHT.shape[-1], device=c_BHT.device)
    # c_i - c_r in fp32. r is the first row of the block of `BLOCK` rows that contains i.
    return (c_BHT - c_BHT[:, :, rows // BLOCK.value * BLOCK.value]).float()


TENSORS = ("first", "end", "sink", "high", "low", "ddecay", "position")
"""The names of the tensors that Triton kernels read or write for these terms."""


@dataclass(frozen=True)
class Terms:
    """Optional inputs of an attention call.

    Attributes:
        sink_H: The logit of each head's attention sink.
        decay_BHS: The decay c of each position [batch, heads, keys], in fp64 or fp32. c_i - c_j is
            added to the logit of query i and key j.
        first_BT: The first key that each query sees, [batch, queries] int32, contiguous.
        position_BT: The position of each query in its document, [batch, queries] int32, contiguous.
    """

    sink_H: Tensor | None = None
    decay_BHS: Tensor | None = None
    first_BT: Tensor | None = None
    position_BT: Tensor | None = None

    @property
    def cost_registers(self) -> bool:
        """Whether a Triton kernel needs many registers for a call's documents, sink and so on."""
        # `position_BT` needs few.
        return not (self.first_BT is None and self.sink_H is None and self.decay_BHS is None)

    def tensors(self, scale: float) -> dict[str, Tensor]:
        """Return the tensors that all Triton kernels read for a call's documents, sink and so on.

        The result is a dict from the name of a tensor to the tensor.
        """
        given = {"first": self.first_BT, "position": self.position_BT}
        found = {name: x for name, x in given.items() if x is not None}
        if self.sink_H is not None:
            found["sink"] = (self.sink_H.float() / scale).contiguous()
        if self.decay_BHS is not None:
            scaled = self.decay_BHS.contiguous().double() / scale
            # Decay / scale is the sum of two fp32 parts.
            found["high"] = scaled.float()
            found["low"] = (scaled - found["high"]).float()
        return found

    def of_keys(self, keys: int) -> dict[str, Tensor]:
        """Return the tensors for documents and decay that only `key_pass` needs.

        The result is a dict from the name of a tensor to the tensor.

        Args:
            keys: The number of keys.
        """
        found = {}
        if self.first_BT is not None:
            key = torch.arange(keys, dtype=torch.int32, device=self.first_BT.device)
            key = key.expand(len(self.first_BT), -1).contiguous()
            # For each key, the first query row from which documents or a window hide it. If no
            # row is hidden, the number of queries.
            found["end"] = torch.searchsorted(self.first_BT, key, right=True, out_int32=True)
        if self.decay_BHS is not None:
            # `key_pass` writes the gradient of the decay into it.
            found["ddecay"] = self.decay_BHS.new_empty(self.decay_BHS.shape, dtype=torch.float32)
        return found

    def gradients(
        self, lse_BHT: Tensor, delta_BHT: Tensor, ddecay_BHS: Tensor | None, offset: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the sink and of the decay, or None for an absent input.

        Args:
            lse_BHT: The log-sum-exp of each softmax, to base 2.
            delta_BHT: The dot product of each query's output and this output's gradient.
            ddecay_BHS: The decay's gradient without the contribution of the sink. This contribution
                is added in place.
            offset: The position of the first query.
        """
        if self.sink_H is None:
            return None, ddecay_BHS
        # The gradient of the sink's logit is -p delta for each query, where p is its softmax
        # weight. The logit is the sink minus the decay at the query's position, so p delta is
        # added to ddecay there.
        null_BHT = self.sink_H.float()[:, None]
        if self.decay_BHS is not None:
            null_BHT = null_BHT - since_reference(self.decay_BHS, offset)
        lost_BHT = torch.exp2(null_BHT / math.log(2.0) - lse_BHT) * delta_BHT
        if ddecay_BHS is not None:
            ddecay_BHS[:, :, offset:] += lost_BHT
        return -lost_BHT.sum((0, 2)), ddecay_BHS


NO_TERMS = Terms()
