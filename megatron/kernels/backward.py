"""Compute the backward pass of fused causal attention in two Triton kernels, without atomics.

    p_ij  = 2^(c y_ij - lse_i)              recomputed, with c = scale log2 e
    ds_ij = p_ij (do_i . v_j - delta_i)     delta_i = do_i . o_i
    dq_i  = scale sum_j ds_ij w_ij k_j      dk_j = scale sum_i ds_ij w_ij q_i
    dv_j  = sum_i p_ij do_i                 dtheta_k = sum_ij ds_ij dx_ij/dtheta_k, x = scale y

do, dq, dk, dv and dtheta are the gradients of the loss with respect to the output o, q, k, v and
theta (the distance kernel's parameters). ds_ij is the gradient with respect to the logit x_ij.

`query_pass`: each program handles M query rows of one head. It sums dq and theta's gradients in
registers and writes its sums for theta to one row of the tensor `sums`. `launch` adds up these rows
in fixed order. `query_pass` also computes delta.

In 16 bits, o is rounded. Where one weight of a row is almost 1, the error of do_i . o_i is larger
than all ds_ij of the row. Therefore `forward_pass` also stores the rounding error of o, and
`query_pass` corrects o by it. A second error remains, because the weights p are rounded before
their product with v. This error would cause most of the error of dtheta. Let excess_i be the true
delta_i, which is sum_j p_ij do_i . v_j, minus do_i . o_i. excess_i is also the sum over j of those
ds_ij that are computed with do_i . o_i. It is known only after the loop over j. Therefore this loop
computes both sum_j ds_ij t_ij and sum_j p_ij t_ij, where t_ij is dx_ij/dtheta_k. After the loop,
excess_i times the second sum is subtracted from the first sum. delta_i for the other Triton kernels
is do_i . o_i + excess_i.

`key_pass`: each program handles N keys of one key head. It sums dk and dv over all query heads that
share these keys. If this gives too few programs to fill a GPU, the query heads are divided into
parts. `launch` then adds up the parts in fixed order.

Each result is written by one program, in a fixed order of summation. Therefore gradients are
repeatable bit for bit.

Legend: see `forward`.
"""

import triton
import triton.language as tl

from megatron.kernels.device import (
    add_columns,
    ex2,
    load_rows,
    opaque,
    spread,
    store_rows,
    table_distance,
)
from megatron.kernels.documents_sink_decay import (
    BLOCK,
    both,
    load_clamped,
    lost_by,
    null_score,
    open_decay,
    row_tile_at,
    row_tiles,
)
from megatron.kernels.dropout import kept
from megatron.kernels.rows import (
    LOG2E,
    ends_of,
    exact_output,
    gradients_of,
    kernel,
    key_tile_at,
    open_group,
    open_head,
    open_rows,
    seen_by,
)


@triton.jit
def query_tile(
    q, do, lse, delta, dq, excess, acc, head, terms, m0, n0,
    f_evaluate: tl.constexpr, f_add: tl.constexpr, WEIGHTED: tl.constexpr, LEARNS: tl.constexpr,
    THETA: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a tile of keys to the gradients of q and the parameters theta."""
    k = load_rows(head.k, n0, head.keys, head.k_t, MASKED, N, E, P)
    v = load_rows(head.v, n0, head.keys, head.v_t, MASKED, N, E, P)
    s = opaque(tl.dot(q, tl.trans(k), input_precision="ieee"))
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    e, p, ds = gradients_of(
        s, dp, lse, delta, head, terms, m0, n0,
        f_evaluate, DROPOUT, k.dtype != tl.float32, MASKED, M, N,
    )  # fmt: skip
    # `excess` [M, W] contains W partial sums for each row. Together they are the row's sum of ds.
    if LEARNS:
        excess = add_columns(excess, ds, q.dtype)
    if THETA:
        acc = f_add(acc, ds, p, e, q.dtype)
    if WEIGHTED:
        ds = ds * e[1]
    # `dq` [M, P] is the gradient of q, divided by scale.
    dq = opaque(tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee"))
    return dq, excess, acc


@kernel
def query_pass(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, sums_ptr, theta_ptr, seed_ptr,
    first_ptr, sink_ptr, high_ptr, low_ptr, position_ptr, lost_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t, do_b, do_h, do_t,
    dq_b, dq_h, dq_t, heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr, f_zeros: tl.constexpr, f_add: tl.constexpr,
    f_finish: tl.constexpr, LEARNS: tl.constexpr, THETA: tl.constexpr, WEIGHTED: tl.constexpr,
    DROPOUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q, and sums for the gradient of the embedding's parameters."""
    # Each program handles M query rows of one head, and writes one row of `sums` [programs,
    # THETA].
    tiles = tl.cdiv(queries, M)
    item, m0 = open_rows(tiles, M)
    head = open_head(
        item, k_ptr, v_ptr, theta_ptr, seed_ptr, k_b, k_h, k_t, v_b, v_h, v_t,
        heads, group, queries, keys, offset, width, scale, threshold, rescale, f_prepare, DROPOUT,
    )  # fmt: skip
    b, h = head.b, head.h
    q = load_rows(q_ptr + b * q_b + h * q_h, m0, queries, q_t, True, M, E, P)
    do = load_rows(do_ptr + b * do_b + h * do_h, m0, queries, do_t, True, M, E, P)
    at = b * out_b + h * out_h
    out = exact_output(out_ptr, lost_ptr, at, m0, queries, out_t, M, E, P)
    delta = tl.sum(do.to(tl.float32) * out, axis=1)
    i = m0 + tl.arange(0, M)
    per_row = item.to(tl.int64) * queries + i
    # lse = +inf makes p = 0 in rows past the last query.
    lse = tl.load(lse_ptr + per_row, mask=i < queries, other=float("inf"))
    seen, terms = seen_by(head, m0, first_ptr, high_ptr, low_ptr, position_ptr, M, N)
    dq = tl.zeros([M, P], dtype=tl.float32)
    W: tl.constexpr = 8 if THETA <= 2 else 1  # with more parameters, registers are few
    excess = tl.zeros([M, W], dtype=tl.float32)
    acc = f_zeros(M, W) if THETA else 0
    if sink_ptr is not None and LEARNS:  # the null key's ds; its value is 0
        p = ex2(null_score(sink_ptr + h, terms.decay, m0, offset, keys, M) * head.c - lse)
        excess -= (p * delta / W)[:, None]
    for MASKED in tl.static_range(2):
        begin, end = ends_of(seen, MASKED)
        for n in tl.range(begin, end, N):
            dq, excess, acc = query_tile(
                q, do, lse, delta, dq, excess, acc,
                head, terms, m0, key_tile_at(n, seen, terms, MASKED), f_evaluate, f_add,
                WEIGHTED, LEARNS, THETA, DROPOUT, MASKED, M, N, E, P,
            )  # fmt: skip
    # delta is the dot product of a row's output and this output's gradient. `excess` corrects
    # delta for the rounding of the output. It is 0 without LEARNS: theta needs no gradient, and
    # there is neither a sink nor a decay.
    excess = tl.sum(excess, axis=1)
    tl.store(delta_ptr + per_row, delta + excess, mask=i < queries)
    store_rows(dq_ptr + b * dq_b + h * dq_h, dq * scale, m0, queries, dq_t, M, E, P)
    if THETA:
        gradients = f_finish(acc, excess, head.constants)
        program = item.to(tl.int64) * tiles + m0 // M
        for n in tl.static_range(THETA):
            tl.store(sums_ptr + program * THETA + n, gradients[n])


@triton.jit
def key_tile(
    k, v, dk, dv, ddecay,
    q_base, do_base, lse_base, delta_base, q_stride, do_stride, m0, n0, offset, queries,
    constants, c, seed, item, threshold, rescale, end, decay, at,
    f_evaluate: tl.constexpr, WEIGHTED: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a tile of queries to `dk`, `dv` and `ddecay`; return the sums."""
    q = load_rows(q_base, m0, queries, q_stride, MASKED, M, E, P)
    do = load_rows(do_base, m0, queries, do_stride, MASKED, M, E, P)
    row = m0 + tl.arange(0, M)
    there = row < queries if MASKED else None  # p = 0 in rows past the last query
    lse = tl.load(lse_base + row, mask=there, other=float("inf") if MASKED else None)
    delta = tl.load(delta_base + row, mask=there, other=0.0 if MASKED else None)
    # Scores are [keys, query rows], so that p and ds need no transpose before the products for dv
    # and dk.
    s = tl.dot(k, tl.trans(q), input_precision="ieee")
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    # m0 changes from tile to tile. It is added to the keys, because a thread has fewer keys.
    i = tl.arange(0, M)[None, :]
    j = (n0 - offset - m0) + tl.arange(0, N)[:, None]
    dj, di = spread(n0 - offset - m0, k.dtype != tl.float32, N, M)
    distance = table_distance(
        (offset + m0 - n0) + i, tl.arange(0, N)[:, None], m0, n0, offset, queries
    )
    limit = None if end is None else i < (end - m0)[:, None]
    gone = None if decay is None else lost_by(decay, offset + m0 // BLOCK * BLOCK)[:, None]
    at = None if at is None else load_clamped(at, m0, queries, M).to(tl.float32)[None, :]
    if MASKED:
        di, dj = tl.maximum(di - dj, 0.0), 0.0
    e = f_evaluate(s, di, dj, distance, constants, at)
    y, mask = e[0] if gone is None else e[0] - gone, both(i >= j, limit)
    p = ex2(y * c - lse[None, :])
    if MASKED:
        p = tl.where(mask, p, 0.0)
    dropped = p
    if DROPOUT:
        keep = tl.trans(kept(seed, item, m0, n0, threshold, M, N))
        dropped = tl.where(keep, p * rescale, 0.0)
        dp = tl.where(keep, dp * rescale, 0.0)
    dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (dp - delta[None, :])
    if decay is not None:
        ddecay -= tl.sum(ds, axis=1)
    if WEIGHTED:
        ds = ds * e[1]
    # `dk` [N, P] is the gradient of k, divided by scale.
    dk = opaque(tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee"))
    return dk, dv, ddecay


@kernel
def key_pass(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, theta_ptr, seed_ptr,
    end_ptr, high_ptr, low_ptr, ddecay_ptr, position_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr, WEIGHTED: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the keys, the values and the decay."""
    # Each program handles N keys of one key head. The `group` query heads that share this key
    # head are divided into equal parts, one for each program (x, part). With a decay, each part
    # has one head. Programs for the first keys start first, because more query rows see these
    # keys.
    tiles = tl.cdiv(keys, N)
    n0 = (tl.program_id(0) % tiles) * N
    b, h_k, first_head, members = open_group(tl.program_id(0) // tiles, heads, group)
    b_64, h_64 = b.to(tl.int64), h_k.to(tl.int64)
    c, seed = scale * LOG2E, tl.load(seed_ptr) if DROPOUT else 0
    k = load_rows(k_ptr + b_64 * k_b + h_64 * k_h, n0, keys, k_t, True, N, E, P)
    v = load_rows(v_ptr + b_64 * v_b + h_64 * v_h, n0, keys, v_t, True, N, E, P)
    dk, dv = tl.zeros([N, P], dtype=tl.float32), tl.zeros([N, P], dtype=tl.float32)
    ddecay, decay = tl.zeros([N], dtype=tl.float32), None
    j, of_decay = n0 + tl.arange(0, N), (b * heads + first_head).to(tl.int64) * keys
    if high_ptr is not None:
        decay = open_decay(high_ptr, low_ptr, b * heads + first_head, tl.minimum(j, keys - 1), keys)
    end_ptr = None if end_ptr is None else end_ptr + b_64 * keys
    at = None if position_ptr is None else position_ptr + b_64 * queries
    end = None if end_ptr is None else load_clamped(end_ptr, n0, keys, N)
    first, whole, full, crossing, masked, rest = row_tiles(end_ptr, n0, offset, queries, keys, M, N)
    # First `masked` tiles that need a mask: `crossing` ones from row `first`, the others from
    # `rest`. Then all others. Nested loops over heads and tiles would need too many registers.
    for FULL in tl.static_range(2):
        count = tl.maximum(full - whole, 0) // M if FULL else masked
        tile, h = 0, first_head
        for n in tl.range(0, members * count):
            tile = n if group == 1 else tile
            item, h_q = b * heads + h, h.to(tl.int64)
            row = item.to(tl.int64) * queries
            dk, dv, ddecay = key_tile(
                k, v, dk, dv, ddecay, q_ptr + b_64 * q_b + h_q * q_h,
                do_ptr + b_64 * do_b + h_q * do_h, lse_ptr + row, delta_ptr + row, q_t, do_t,
                whole + tile * M if FULL else row_tile_at(tile, crossing, first, rest, end, M),
                n0, offset, queries, f_prepare(theta_ptr + h_q * width, width, scale), c,
                seed, item, threshold, rescale, end, decay, at,
                f_evaluate, WEIGHTED, DROPOUT, not FULL, M, N, E, P,
            )  # fmt: skip
            tile += 1
            if group > 1:  # after the last tile of a head comes the first one of the next head
                h = tl.where(tile == count, h + 1, h)
                tile = tl.where(tile == count, 0, tile)
    # Only the part of the decay's gradient that comes from the keys.
    if ddecay_ptr is not None:
        tl.store(ddecay_ptr + of_decay + j, ddecay, mask=j < keys)
    h_out = (h_k * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    store_rows(dk_ptr + b_64 * dk_b + h_out * dk_h, dk * scale, n0, keys, dk_t, N, E, P)
    store_rows(dv_ptr + b_64 * dv_b + h_out * dv_h, dv, n0, keys, dv_t, N, E, P)
