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

In addition to `out`, the backward pass needs `lse` = c max y + log2(sum), [B, H, T] fp32. If `out`
has 16 bits, the backward pass also needs `lost`: the rounding error of `out` times the constant
LOST, in the dtype of `out`.

Legend: B batch, H heads, T queries, S keys, E head size, P padded head size, M rows and N keys of a
tile. Arguments whose names start with `f_` are the device functions of the distance kernel.
"""

import triton
import triton.language as tl

from megatron.kernels.device import ex2, load_rows, opaque, store_rows
from megatron.kernels.documents_sink_decay import LEAST, null_score
from megatron.kernels.dropout import kept
from megatron.kernels.rows import (
    LOST,
    ends_of,
    kernel,
    key_tile_at,
    logits_of,
    open_head,
    open_rows,
    seen_by,
)


@triton.jit
def forward_tile(
    q, top, total, acc, head, terms, m0, n0,
    f_evaluate: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the online softmax of several query rows."""
    k = load_rows(head.k, n0, head.keys, head.k_t, MASKED, N, E, P)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    _, y, mask = logits_of(s, head, terms, m0, n0, f_evaluate, k.dtype != tl.float32, MASKED, M, N)
    if MASKED:
        y = tl.where(mask, y, -float("inf"))
    # y is a logit divided by scale, and `top` the largest y of each row so far.
    new_top = tl.maximum(top, tl.max(y, axis=1))
    p = ex2(y * head.c - (new_top * head.c)[:, None])
    shrink = ex2((top - new_top) * head.c)
    # The sum of the softmax numerators 2^(c (y - top)), with c = scale log2 e.
    total = total * shrink + tl.sum(p, axis=1)
    # The sum of the values v, each multiplied by its numerator.
    acc = acc * shrink[:, None]
    if DROPOUT:
        p = tl.where(kept(head.seed, head.item, m0, n0, head.threshold, M, N), p, 0.0)
    v = load_rows(head.v, n0, head.keys, head.v_t, MASKED, N, E, P)
    acc = opaque(tl.dot(p.to(v.dtype), v, acc, input_precision="ieee"))
    return new_top, total, acc


@kernel
def forward_pass(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, theta_ptr, seed_ptr,
    first_ptr, sink_ptr, high_ptr, low_ptr, position_ptr, lost_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the attention output, and the tensors `lse` and `lost` for the backward pass."""
    # Each program handles M query rows of one head, and visits the keys that they see, N at a
    # time.
    tiles = tl.cdiv(queries, M)
    item, m0 = open_rows(tiles, M)
    head = open_head(
        item, k_ptr, v_ptr, theta_ptr, seed_ptr, k_b, k_h, k_t, v_b, v_h, v_t,
        heads, group, queries, keys, offset, width, scale, threshold, rescale, f_prepare, DROPOUT,
    )  # fmt: skip
    b, h, c = head.b, head.h, head.c
    q = load_rows(q_ptr + b * q_b + h * q_h, m0, queries, q_t, True, M, E, P)
    seen, terms = seen_by(head, m0, first_ptr, high_ptr, low_ptr, position_ptr, M, N)
    top = tl.full([M], LEAST, dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    if sink_ptr is not None:  # the null key comes first
        top = null_score(sink_ptr + h, terms.decay, m0, offset, keys, M)
        total = tl.full([M], 1.0, dtype=tl.float32)
    acc = tl.zeros([M, P], dtype=tl.float32)
    for MASKED in tl.static_range(2):
        begin, end = ends_of(seen, MASKED)
        for n in tl.range(begin, end, N):
            top, total, acc = forward_tile(
                q, top, total, acc, head, terms, m0, key_tile_at(n, seen, terms, MASKED),
                f_evaluate, DROPOUT, MASKED, M, N, E, P,
            )  # fmt: skip
    out = acc * (rescale / total)[:, None]
    at = b * out_b + h * out_h
    store_rows(out_ptr + at, out, m0, queries, out_t, M, E, P)
    if lost_ptr is not None:
        lost = (out - out.to(q.dtype).to(tl.float32)) * LOST
        store_rows(lost_ptr + at, lost, m0, queries, out_t, M, E, P)
    i = m0 + tl.arange(0, M)
    lse = top * c + tl.log2(total)
    tl.store(lse_ptr + item.to(tl.int64) * queries + i, lse, mask=i < queries)
