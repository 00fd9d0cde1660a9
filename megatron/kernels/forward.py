"""Compute the forward pass of fused causal attention in one Triton kernel.

    y_ij = s_ij w(d) + b(d, i) / scale     s_ij = q_i . k_j     d = query_offset + i - j >= 0
    out_i = sum_j p_ij v_j              p_ij = softmax_j(scale y_ij)

w and b are the factor and the bias of the distance kernel. They depend on the query-key distance d.
Some biases also depend on the query's position i. w contains the temperature t(i) if there is one.
`codegen` describes how w and b are computed at low cost per score.

One program computes M query rows of one head, N keys at a time. It updates the running maximum and
sum of the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022, arXiv 2205.14135) to base
2, that is, p = 2^(c y - c max y) with c = scale log2 e. Tiles with only past keys need no mask, and
tiles with only future keys are skipped. The programs with the most keys start first.

In addition to `out`, the backward pass needs `lse` = c max y + log2(sum), [B, H, T] fp32.

Legend: B batch, H heads, T queries, S keys, E head size, P padded head size, M rows and N keys of a
tile. Arguments whose names start with `f_` are the device functions of the distance kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.kernels.device import ex2, kept, load_rows, opaque, spread, store_rows, table_distance
from megatron.kernels.terms import (
    LEAST,
    both,
    first_keys,
    key_tile_at,
    lost,
    null_score,
    open_decay,
    positions_of,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward_tile(
    q, top, total, acc,
    k_base, v_base, k_stride, v_stride, m0, n0, offset, queries, keys, constants, c,
    seed, item, threshold, first, decay, at,
    f_evaluate: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Return the running maximum, running sum and weighted sum of v, updated by a tile of keys."""
    k = load_rows(k_base, n0, keys, k_stride, MASKED, N, E, P)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    i = (offset + m0 - n0) + tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    distance = table_distance(i, j, m0, n0, offset, queries)
    di, dj = spread(offset + m0 - n0, k.dtype != tl.float32, M, N)
    if MASKED:
        di, dj = tl.maximum(di - dj, 0.0), 0.0
    y = f_evaluate(s, di, dj, distance, constants, at)[0]
    if decay is not None:
        y -= lost(decay, n0, keys, MASKED, N)[None, :]
    if MASKED:
        limit = None if first is None else j >= (first - n0)[:, None]
        y = tl.where(both(i >= j, limit), y, -float("inf"))
    new_top = tl.maximum(top, tl.max(y, axis=1))
    p = ex2(y * c - (new_top * c)[:, None])
    shrink = ex2((top - new_top) * c)
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    if DROPOUT:
        p = tl.where(kept(seed, item, m0, n0, threshold, M, N), p, 0.0)
    v = load_rows(v_base, n0, keys, v_stride, MASKED, N, E, P)
    acc = opaque(tl.dot(p.to(v.dtype), v, acc, input_precision="ieee"))
    return new_top, total, acc


@triton.jit(do_not_specialize=["heads", "queries", "keys", "offset", "width", "threshold"])
def forward_pass(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, theta_ptr, seed_ptr,
    first_ptr, sink_ptr, high_ptr, low_ptr, position_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the attention output and `lse`, one tile of query rows of one head per program.

    Programs are ordered by sequence and head, then by tile, the last query rows first. The
    backward pass needs `lse`, the logarithm to base 2 of the softmax's denominator.
    """
    tiles = tl.cdiv(queries, M)
    item = tl.program_id(0) // tiles
    m0 = (tiles - 1 - tl.program_id(0) % tiles) * M
    b = (item // heads).to(tl.int64)
    h = item % heads
    q_base = q_ptr + b * q_b + h.to(tl.int64) * q_h
    k_base = k_ptr + b * k_b + (h // group).to(tl.int64) * k_h
    v_base = v_ptr + b * v_b + (h // group).to(tl.int64) * v_h
    constants = f_prepare(theta_ptr + h.to(tl.int64) * width, width, scale)
    c = scale * LOG2E
    seed = tl.load(seed_ptr) if DROPOUT else 0

    q = load_rows(q_base, m0, queries, q_t, True, M, E, P)
    last = tl.minimum(offset + m0 + M, offset + queries)  # keys that the tile's last row sees
    past = (offset + m0 + 1) // N * N  # keys in tiles that every row sees completely
    first, decay, begin, lead = None, None, 0, 0
    top = tl.full([M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    if first_ptr is not None:
        first, begin, lead = first_keys(first_ptr + b * queries, m0, queries, past, M, N)
        top = tl.full([M], LEAST, dtype=tl.float32)
    if high_ptr is not None:
        decay = open_decay(high_ptr, low_ptr, item, m0, offset, keys)
    at = None if position_ptr is None else positions_of(position_ptr, b, m0, queries, M)[:, None]
    if sink_ptr is not None:  # the null key comes first
        top = null_score(sink_ptr + h, decay, m0, offset, keys, M)
        total = tl.full([M], 1.0, dtype=tl.float32)
    acc = tl.zeros([M, P], dtype=tl.float32)
    for MASKED in tl.static_range(2):
        for n in tl.range(past - (lead - begin) if MASKED else lead, last if MASKED else past, N):
            n0 = key_tile_at(n, past, lead, first, MASKED)
            top, total, acc = forward_tile(
                q, top, total, acc,
                k_base, v_base, k_t, v_t, m0, n0, offset, queries, keys, constants, c,
                seed, item, threshold, first, decay, at,
                f_evaluate, DROPOUT, MASKED, M, N, E, P,
            )  # fmt: skip
    out = acc * (rescale / total)[:, None]
    o_base = out_ptr + b * out_b + h.to(tl.int64) * out_h
    store_rows(o_base, out, m0, queries, out_t, M, E, P)
    i = m0 + tl.arange(0, M)
    lse = top * c + tl.log2(total)
    tl.store(lse_ptr + item.to(tl.int64) * queries + i, lse, mask=i < queries)
