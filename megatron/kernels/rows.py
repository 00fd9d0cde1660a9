"""Define code that the Triton kernels share: the start of a program, and the logits of its rows.

In `forward_pass`, `query_pass` and `hidden_pass`, a program handles M query rows of one head, and
visits the keys that these rows see, N at a time. `table_pass` visits tiles of one head, too.

Legend: see `forward`.
"""

from collections import namedtuple

import triton
import triton.language as tl

from megatron.kernels.device import ex2, load_rows, spread, table_distance
from megatron.kernels.documents_sink_decay import BLOCK, both, load_clamped, lost, open_decay
from megatron.kernels.dropout import kept

LOG2E = tl.constexpr(1.4426950408889634)
LOST = tl.constexpr(2048.0)
"""The factor of `lost` (see `forward`). Without it, small numbers would be subnormal in fp16."""

Head = namedtuple(
    "Head", "item b h k v k_t v_t offset queries keys constants c seed threshold rescale"
)
"""The head of one program.

`b` is the sequence, `h` the head, and `item` is b * heads + h. `k` and `v` point to the first row
of the key head, whose rows are `k_t` and `v_t` apart. `constants` is what `f_prepare` returned, and
c is scale log2 e. `seed` is the number that `seed_ptr` points to, or 0 without dropout. The other
entries are arguments of the kernel."""

kernel = triton.jit(
    do_not_specialize=["heads", "queries", "keys", "offset", "width", "threshold"],
    do_not_specialize_on_alignment=["group"],
)
"""The decorator of functions that the host launches: sizes that differ from call to call compile no
new kernel."""

KeyTiles = namedtuple("KeyTiles", "begin lead past last")
"""The keys that some rows see: those from `begin` on and before `last`.

All rows see all keys of the tiles from `lead` to `past`, so these tiles need no mask. Tiles before
`lead` have keys that documents or a window hide from some rows. Tiles from `past` on have future
keys."""

RowTerms = namedtuple("RowTerms", "first decay at")
"""The terms of some rows beside the distance kernel (see `documents_sink_decay`).

The tuple `first` has one entry, the first key that each row sees, [M]. `decay` is what `open_decay`
returned. If the call has no such term, the tuple is empty. `at` [M, 1] is the position of each row
in its document, if the distance kernel depends on it."""


@triton.jit
def open_rows(tiles, M: tl.constexpr):
    """Return which head of which sequence a program handles, and the program's first query row."""
    # Ordered by pair (sequence, head), then by tile. The last tile comes first, because its rows
    # see the most keys.
    return tl.program_id(0) // tiles, (tiles - 1 - tl.program_id(0) % tiles) * M


@triton.jit
def open_head(
    item, k_ptr, v_ptr, theta_ptr, seed_ptr, k_b, k_h, k_t, v_b, v_h, v_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return the pointers and numbers that a program needs for one head of one sequence."""
    # `item` is the index of the head in the flattened dimension of sequences and heads.
    b, h = (item // heads).to(tl.int64), item % heads
    h_q, h_k = h.to(tl.int64), (h // group).to(tl.int64)
    k, v = k_ptr + b * k_b + h_k * k_h, v_ptr + b * v_b + h_k * v_h
    constants, c = f_prepare(theta_ptr + h_q * width, width, scale), scale * LOG2E
    seed = tl.load(seed_ptr) if DROPOUT else 0
    return Head(
        item, b, h_q, k, v, k_t, v_t, offset, queries, keys, constants, c, seed, threshold, rescale
    )


@triton.jit
def open_group(key_item, heads, group):
    """Return which query heads of a key head a program visits.

    The result is (sequence, key head, first query head, number of query heads). Several programs
    may divide the query heads of a key head.
    """
    # `key_item` is the index of the key head in the flattened dimension of sequences and key heads.
    key_heads = heads // group
    parts, part = tl.num_programs(1), tl.program_id(1)
    b = key_item // key_heads
    h_k = key_item % key_heads
    members = group // parts if group > 1 else 1
    return b, h_k, h_k * group + part * members if group > 1 else h_k, members


@triton.jit
def exact_output(
    out_ptr, lost_ptr, at, m0, queries, out_t, M: tl.constexpr, E: tl.constexpr, P: tl.constexpr
):
    """Return rows of the attention output in fp32, corrected by their stored rounding errors."""
    out = load_rows(out_ptr + at, m0, queries, out_t, True, M, E, P).to(tl.float32)
    if lost_ptr is not None:
        lost = load_rows(lost_ptr + at, m0, queries, out_t, True, M, E, P)
        out = tl.fma(lost.to(tl.float32), 1.0 / LOST, out)
    return out


@triton.jit
def seen_by(head, m0, first_ptr, high_ptr, low_ptr, position_ptr, M: tl.constexpr, N: tl.constexpr):
    """Return which tiles of keys a tile of query rows sees, and the optional inputs of these rows.

    The optional inputs are the first key that each row sees, the decay and the rows' positions.
    """
    offset, queries = head.offset, head.queries
    last, past = tl.minimum(offset + m0 + M, offset + queries), (offset + m0 + 1) // N * N
    first, begin, lead, decay, at = (), 0, 0, (), 0
    if first_ptr is not None:
        first_ptr += head.b * queries
        end = tl.minimum(m0 + M, queries)
        first = (load_clamped(first_ptr, m0, end, M),)
        begin = tl.load(first_ptr + m0) // N * N
        lead = tl.minimum(tl.cdiv(tl.load(first_ptr + (end - 1)), N) * N, past)
    if high_ptr is not None:
        decay = open_decay(high_ptr, low_ptr, head.item, offset + m0 // BLOCK * BLOCK, head.keys)
    if position_ptr is not None:
        at = load_clamped(position_ptr + head.b * queries, m0, queries, M).to(tl.float32)[:, None]
    return KeyTiles(begin, lead, past, last), RowTerms(first, decay, at)


@triton.jit
def ends_of(seen, MASKED: tl.constexpr):
    """Return the start and the end of a loop over tiles of keys.

    If `MASKED` is true, the loop visits the tiles that need a mask. If not, it visits the others.
    """
    # The loop variable is the first key of a tile. The tiles that need a mask form two groups:
    # from `seen.begin` to `seen.lead`, and from `seen.past` to `seen.last`. To visit both groups
    # in one loop, `seen.past` - `seen.lead` is added to the keys of the first group.
    # `key_tile_at` subtracts it.
    if MASKED:
        return seen.past - (seen.lead - seen.begin), seen.last
    else:
        return seen.lead, seen.past


@triton.jit
def key_tile_at(n, seen, terms, MASKED: tl.constexpr):
    """Return the first key of the tile that a loop over tiles of keys visits at the counter `n`."""
    if MASKED and len(terms.first):
        n = tl.where(n < seen.past, n - (seen.past - seen.lead), n)
    return n


@triton.jit
def logits_of(
    s, head, terms, m0, n0, f_evaluate: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the logits of a tile of query-key products, and a mask of the keys each row sees."""
    start = head.offset + m0 - n0
    i, j = start + tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    distance = table_distance(i, j, m0, n0, head.offset, head.queries)
    di, dj = spread(start, SHARED, M, N)
    if MASKED:
        di, dj = tl.maximum(di - dj, 0.0), 0.0
    e = f_evaluate(s, di, dj, distance, head.constants, terms.at)
    y = e[0]
    if len(terms.decay):
        y -= lost(terms.decay, n0, head.keys, MASKED, N)[None, :]
    limit = j >= (terms.first[0] - n0)[:, None] if len(terms.first) else None
    # (results of `f_evaluate`, logits divided by scale, mask). Without MASKED, all rows see all
    # keys, and the mask must not be used.
    return e, y, both(i >= j, limit)


@triton.jit
def gradients_of(
    s, dp, lse, delta, head, terms, m0, n0, f_evaluate: tl.constexpr, DROPOUT: tl.constexpr,
    SHARED: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the softmax weights of a tile, and the gradients of its logits."""
    logits = logits_of(s, head, terms, m0, n0, f_evaluate, SHARED, MASKED, M, N)
    e, y, mask = logits  # in two statements, for basedpyright
    # `lse` is the logarithm to base 2 of each row's softmax denominator. These are the weights
    # before dropout.
    p = ex2(y * head.c - lse[:, None])
    if MASKED:
        p = tl.where(mask, p, 0.0)
    if DROPOUT:
        keep = kept(head.seed, head.item, m0, n0, head.threshold, M, N)
        dp = tl.where(keep, dp * head.rescale, 0.0)
    # dp is do_i . v_j, and delta is do_i . o_i. do_i is the gradient of o_i, the output of row i.
    return e, p, p * (dp - delta[:, None])
