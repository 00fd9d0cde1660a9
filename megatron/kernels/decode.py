"""Compute attention of few queries to many keys, as in generation, in two Triton kernels.

    out_i = sum_n 2^(lse_in - lse_i) out_in      lse_i = log2 sum_n 2^lse_in

`decode_pass` computes out_in and lse_in: the output and `lse` (see `forward`) of query i for the
n-th part of the keys alone. A part has CHUNK keys. The rows of a tile are the queries of all query
heads that share a key head. Therefore each key is read only once. `merge_pass` adds up the parts in
a fixed order. The division into parts depends on the number of keys alone. Therefore the result is
repeatable bit for bit. For the same number of keys, the result does not depend on the other
sequences in the batch.

These kernels have no backward pass and no dropout.

Legend: see `forward`. n counts the parts.
"""

import triton.language as tl

from megatron.kernels.device import ex2, store_rows
from megatron.kernels.documents_sink_decay import LEAST
from megatron.kernels.forward import forward_tile
from megatron.kernels.rows import LOG2E, Head, RowTerms, kernel

CHUNK = tl.constexpr(256)
"""The number of keys of a part. The key heads and parts of a sequence of 4,096 tokens are then 128
programs for 8 key heads, and the fp32 outputs of the parts are at most an eighth of the keys and
values in 16 bits, for up to 16 rows."""


@kernel
def decode_pass(
    q_ptr, k_ptr, v_ptr, parts_ptr, lses_ptr, theta_ptr, first_ptr, sink_ptr, position_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, parts_b, parts_h, parts_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the attention output and log-sum-exp of some query rows for a part of the keys."""
    # Program (x, n) handles the n-th part of the keys for M rows. Row r is query r // group of
    # the query head r mod group among the heads that share a key head.
    tiles, n, count = tl.cdiv(queries * group, M), tl.program_id(1), tl.num_programs(1)
    key_item, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * M + tl.arange(0, M)
    b, h_k = (key_item // (heads // group)).to(tl.int64), (key_item % (heads // group)).to(tl.int64)
    there = (row < queries * group)[:, None]
    row = tl.minimum(row, queries * group - 1)  # the last row again
    h, t = (h_k * group + row % group)[:, None], (row // group)[:, None]
    acc, column = tl.zeros([M, P], dtype=tl.float32), tl.arange(0, P)[None, :]
    q = tl.load(q_ptr + b * q_b + h * q_h + t * q_t + column, mask=column < E, other=0.0)
    # `logits_of` adds the index of a row of the tile to the offset, and the offset to row 0.
    at_row = offset + t - tl.arange(0, M)[:, None]
    constants, c = f_prepare(theta_ptr + h * width, width, scale), scale * LOG2E
    k, v = k_ptr + b * k_b + h_k * k_h, v_ptr + b * v_b + h_k * v_h
    head = Head(0, b, h_k, k, v, k_t, v_t, at_row, M, keys, constants, c, 0, threshold, rescale)
    begin, first, at = n * CHUNK, (), 0
    if first_ptr is not None:
        first = (tl.load(first_ptr + b * queries + row // group),)
        begin = tl.maximum(begin, tl.min(first[0]) // N * N)
    if position_ptr is not None:
        at = tl.load(position_ptr + b * queries + t).to(tl.float32)
    top, total = tl.full([M], LEAST, dtype=tl.float32), tl.zeros([M], dtype=tl.float32)
    if sink_ptr is not None:  # the null key belongs to the first part
        top = tl.where(n == 0, tl.load(sink_ptr + h_k * group + row % group), top)
        total += tl.where(n == 0, 1.0, 0.0)
    for n0 in tl.range(begin, tl.minimum(n * CHUNK + CHUNK, keys), N):
        top, total, acc = forward_tile(
            q, top, total, acc, head, RowTerms(first, (), at), 0, n0,
            f_evaluate, False, True, M, N, E, P,
        )  # fmt: skip
    # Where a row sees no key of this part, its `lse` is about -1e9, so that the part has no share.
    total = tl.where(total > 0.0, total, 1.0)
    # The results of head h and part n are stored as head h * count + n.
    to = b * parts_b + (h * count + n) * parts_h + t * parts_t
    tl.store(parts_ptr + to + column, acc / total[:, None], mask=there & (column < E))
    # The logarithm to base 2.
    lse = (top * c + tl.log2(total))[:, None]
    tl.store(lses_ptr + ((b * heads + h) * count + n) * queries + t, lse, mask=there)


@kernel
def merge_pass(
    parts_ptr, lses_ptr, out_ptr, lse_ptr,
    parts_b, parts_h, parts_t, out_b, out_h, out_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the attention output of a query from the results of `decode_pass` for all parts."""
    # The parts are added up N at a time.
    row, count = tl.program_id(0), tl.cdiv(keys, CHUNK)
    item, t = (row // queries).to(tl.int64), row % queries
    b, h = item // heads, item % heads
    lses_ptr += item * count * queries + t
    parts_ptr += b * parts_b + h * count * parts_h + t * parts_t
    n, column = tl.arange(0, N), tl.arange(0, P)[None, :]
    top, total = tl.full([N], -float("inf"), dtype=tl.float32), tl.zeros([N], dtype=tl.float32)
    for n0 in tl.range(0, count, N):
        lse = tl.load(lses_ptr + (n0 + n) * queries, mask=n0 + n < count, other=-float("inf"))
        top = tl.maximum(top, lse)
    highest, acc = tl.max(top), tl.zeros([1, P], dtype=tl.float32)
    for n0 in tl.range(0, count, N):
        lse = tl.load(lses_ptr + (n0 + n) * queries, mask=n0 + n < count, other=-float("inf"))
        there = (n0 + n < count)[:, None] & (column < E)
        x = tl.load(parts_ptr + (n0 + n)[:, None] * parts_h + column, mask=there, other=0.0)
        share = ex2(lse - highest)
        total += share
        acc += tl.sum(share[:, None] * x, axis=0, keep_dims=True)
    store_rows(out_ptr + b * out_b + h * out_h, acc / tl.sum(total), t, t + 1, out_t, 1, E, P)
    tl.store(lse_ptr + row, highest + tl.log2(tl.sum(total)))
