"""Support distance kernels that are given by a table of values per head instead of a formula.

A distance kernel is a bias b or a factor w of the scores that depends only on the query-key
distance d. Any torch function of d can be tabulated, for example T5's buckets, or a formula that
`codegen` cannot express. "Theta" is then one row of numbers per head. The row contains b(d) / scale
for all distances if there is a bias, followed by w(d) for all distances if there is a factor.
Autograd propagates the gradient of this row to the parameters from which the row was computed. The
gradients at distance d are sums over all i, j with i - j = d:

    gradient of b(d) / scale = sum (scale * ds_ij)
    gradient of w(d)         = sum (scale * ds_ij * s_ij)

`table_pass` computes these gradients, without atomics and in fixed order. A program walks over the
square tiles [R, R] whose upper left corners are at the same distance D, a multiple of R. Row r and
column c of such a tile are at distance D + r - c, so the tile must be summed along its diagonals.
To this end the entry in column c of row r is moved to column e = (r - c) mod R. Column e then has
two groups of entries: those with e <= r are at distance D + e, and those with e > r are at distance
D + e - R. Each group is summed separately.

Legend: see `forward`, and `backward` for ds. G is the number of distances D = 0, R, 2R, .... A
dimension "tables" has two entries (b / scale, then w), or one if there is only a bias or only a
factor. A dimension "groups" has one entry for each of the two groups.
"""

import triton
import triton.language as tl

from megatron.kernels.device import ex2, load_rows
from megatron.kernels.device_functions import DeviceFunctions
from megatron.kernels.documents_sink_decay import BLOCK, lost, lost_at, open_decay
from megatron.kernels.dropout import kept
from megatron.kernels.rows import kernel, open_head


@triton.jit
def prepare(theta, width, scale):
    return (theta, theta + width // 2)


@triton.jit
def evaluate_bias(s, di, dj, d, c, row):
    return (s + tl.load(c[0] + d), 1.0)


@triton.jit
def evaluate_weight(s, di, dj, d, c, row):
    w = tl.load(c[0] + d)
    return (s * w, w)


@triton.jit
def evaluate_both(s, di, dj, d, c, row):
    w = tl.load(c[1] + d)
    return (s * w + tl.load(c[0] + d), w)


def device_functions(bias: bool, weight: bool) -> DeviceFunctions:
    """Return device functions for an embedding that is given as a table over distances.

    Args:
        bias: Whether the table contains a bias of the logits.
        weight: Whether the table contains a number that multiplies each query-key product.
    """
    evaluate = {(1, 0): evaluate_bias, (0, 1): evaluate_weight, (1, 1): evaluate_both}
    return DeviceFunctions(prepare, evaluate[bias, weight], weight, tabulated=True, biased=bias)


@triton.jit
def by_distance(x, R: tl.constexpr):
    """Return the sums of a square tile [R, R] along its diagonals, in two tensors [R].

    The entry in row r and column c is at distance D + r - c. Element e of the first result is the
    sum at distance D + e. Element e of the second result is the sum at distance D + e - R.
    """
    r = tl.arange(0, R)[:, None]
    e = tl.arange(0, R)[None, :]
    turned = tl.gather(x, (r - e + R) % R, axis=1)
    near = e <= r
    return tl.sum(tl.where(near, turned, 0.0), axis=0), tl.sum(tl.where(near, 0.0, turned), axis=0)


@triton.jit
def store_sums(pointers, near, far, R: tl.constexpr):
    tl.store(pointers, near)
    tl.store(pointers + R, far)


@triton.jit
def load_inside(base, row, inside, stride, E: tl.constexpr, P: tl.constexpr):
    """Load rows of a matrix. Padding, and rows outside of the matrix, are filled with zeros."""
    column = tl.arange(0, P)[None, :]
    pointers = base + row.to(tl.int64)[:, None] * stride + column
    return tl.load(pointers, mask=inside[:, None] & (column < E), other=0.0)


@triton.jit
def tile_gradients(
    head, q_base, do_base, q_t, do_t, lse_ptr, delta_ptr, first_ptr, high_ptr, low_ptr, m0, n0,
    f_evaluate: tl.constexpr, DROPOUT: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Return the query-key products of a tile, and the gradients of its logits."""
    offset, queries, keys = head.offset, head.queries, head.keys
    # `m0` may be negative. ds is 0 where a row does not exist or does not see a key.
    i = m0 + tl.arange(0, R)
    column = tl.arange(0, R)
    there = (i >= 0) & (i < queries)
    row, safe = tl.minimum(i, queries - 1), tl.maximum(i, 0)
    q = load_inside(q_base, safe, there, q_t, E, P)
    do = load_inside(do_base, safe, there, do_t, E, P)
    k = load_rows(head.k, n0, keys, head.k_t, True, R, E, P)
    v = load_rows(head.v, n0, keys, head.v_t, True, R, E, P)
    per_row = head.item.to(tl.int64) * queries + safe
    lse = tl.load(lse_ptr + per_row, mask=there, other=float("inf"))
    delta = tl.load(delta_ptr + per_row, mask=there, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    distance = (offset + row - n0)[:, None] - column[None, :]
    seen = (distance >= 0) & there[:, None]
    if first_ptr is not None:
        seen &= n0 + column[None, :] >= tl.load(first_ptr + tl.minimum(safe, queries - 1))[:, None]
    y = f_evaluate(s, 0.0, 0.0, tl.maximum(distance, 0), head.constants, None)[0]
    if high_ptr is not None:  # both y and lse relative to the decay of the tile's first row
        decay = open_decay(high_ptr, low_ptr, head.item, offset + m0, keys)
        y -= lost(decay, n0, keys, True, R)[None, :]
        blocks = offset + tl.minimum(safe, queries - 1) // BLOCK * BLOCK
        lse -= lost_at(decay, blocks) * head.c
    p = tl.where(seen, ex2(y * head.c - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    if DROPOUT:
        keep = kept(head.seed, head.item, m0, n0, head.threshold, R, R)
        dp = tl.where(keep, dp * head.rescale, 0.0)
    ds = p * (dp - delta[:, None])
    return s, ds


@kernel
def table_pass(
    q_ptr, k_ptr, v_ptr, do_ptr, sums_ptr, lse_ptr, delta_ptr, theta_ptr, seed_ptr,
    first_ptr, high_ptr, low_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr, BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr, DROPOUT: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute sums for the gradient of a table over query-key distances."""
    # Each program handles one head of one sequence and one distance D. It visits the tiles whose
    # upper left entry is at distance D. The other entries of such a tile are at distances from D
    # - R + 1 to D + R - 1.
    tiles = tl.cdiv(offset + queries, R)
    item = tl.program_id(0) // tiles
    far = (tl.program_id(0) % tiles) * R  # D
    head = open_head(
        item, k_ptr, v_ptr, theta_ptr, seed_ptr, k_b, k_h, k_t, v_b, v_h, v_t,
        heads, group, queries, keys, offset, width, scale, threshold, rescale, f_prepare, DROPOUT,
    )  # fmt: skip
    q_base, do_base = q_ptr + head.b * q_b + head.h * q_h, do_ptr + head.b * do_b + head.h * do_h
    zeros_R = tl.zeros([R], dtype=tl.float32)
    b_near, b_far, w_near, w_far = zeros_R, zeros_R, zeros_R, zeros_R
    first_ptr = None if first_ptr is None else first_ptr + head.b * queries
    # Query tiles begin at positions that are multiples of R, and therefore key tiles do, too.
    for position in tl.range(tl.maximum(offset // R * R, far), offset + queries, R):
        m0, n0 = position - offset, position - far
        if True if first_ptr is None else n0 + R > tl.load(first_ptr + tl.maximum(m0, 0)):
            s, ds = tile_gradients(
                head, q_base, do_base, q_t, do_t, lse_ptr, delta_ptr, first_ptr, high_ptr, low_ptr,
                m0, n0, f_evaluate, DROPOUT, R, E, P,
            )  # fmt: skip
            if BIASED:
                near, away = by_distance(ds * scale, R)
                b_near += near
                b_far += away
            if WEIGHTED:
                near, away = by_distance(ds * s * scale, R)
                w_near += near
                w_far += away
    tables: tl.constexpr = BIASED + WEIGHTED
    sums = sums_ptr + (item.to(tl.int64) * tables * tiles + far // R) * (2 * R) + tl.arange(0, R)
    if BIASED:
        store_sums(sums, b_near, b_far, R)
    if WEIGHTED:
        store_sums(sums + (tables - 1) * tiles * (2 * R), w_near, w_far, R)
