"""Device functions that all passes share: fast special functions, loads, the dropout mask.

On a GPU, `lg2` and `rcp` are single instructions, exact to about 2^-22, which flush subnormal
numbers to zero (`tl.log2` is a software routine of more than 20 instructions). In Triton's
interpreter they are numpy's functions.

Legend: M query rows, N keys of a tile, E head size, P the next power of two >= max(E, 16).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret
"""Whether `@triton.jit` makes functions for the interpreter: fixed when Triton is imported."""

LOG2_ZERO = tl.constexpr(-1e30)
"""lg2(0) in formulas that need a finite one: 2^(p lg2 0) = 0, 2^(p lg2 0) lg2 0 = 0 for p > 0."""

if INTERPRETED:

    @triton.jit
    def lg2(x):
        return tl.log2(x)

    @triton.jit
    def lg2_or_finite(x):
        """lg2 of x >= 0; LOG2_ZERO where x = 0."""
        return tl.where(x > 0.0, tl.log2(tl.where(x > 0.0, x, 1.0)), LOG2_ZERO)

    @triton.jit
    def rcp(x):
        return 1.0 / x

    @triton.jit
    def rcp_any(x):
        return 1.0 / x

    @triton.jit
    def ex2(x):
        return tl.exp2(x)

    @triton.jit
    def opaque(x):
        return x

else:

    @triton.jit
    def lg2(x):
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def lg2_or_finite(x):
        """lg2 of x >= 0; LOG2_ZERO where x = 0."""
        return tl.maximum(lg2(x), LOG2_ZERO)

    @triton.jit
    def rcp(x):
        """1 / x for 1e-19 < |x| < 1e19: two numbers with one special function and three products,
        by 1/a = b / (ab). The passes spend most time on the special-function unit."""
        return tl.inline_asm_elementwise(
            "{ .reg .f32 r; mul.f32 r, $2, $3; rcp.approx.ftz.f32 r, r; "
            "mul.f32 $0, r, $3; mul.f32 $1, r, $2; }",
            "=&f,=&f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip

    @triton.jit
    def rcp_any(x):
        """1 / x for every x, infinite ones too."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def ex2(x):
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def opaque(x):
        """x, in a form that the compiler cannot see through. Otherwise it would compute
        s + b(d) / scale by a product that starts from b, and b would occupy registers meanwhile."""
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def load_rows(
    base, first, limit, stride, MASKED: tl.constexpr, ROWS: tl.constexpr,
    E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """[ROWS, P]: the rows from `first` on of a tensor with `limit` rows; zeros past row `limit` and
    past column E.

    Without MASKED all rows must exist. The offset is 64-bit: row `first` may be gigabytes away.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, P)
    pointers = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    if MASKED and E < P:
        there = (row[:, None] < limit - first) & (column[None, :] < E)
        return tl.load(pointers, mask=there, other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=row[:, None] < limit - first, other=0.0)
    elif E < P:
        return tl.load(pointers, mask=column[None, :] < E, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    base, tile, first, limit, stride, ROWS: tl.constexpr, E: tl.constexpr, P: tl.constexpr
):
    """The counterpart of `load_rows`, always masked."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, P)
    pointers = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    there = (row[:, None] < limit - first) & (column[None, :] < E)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=there)


@triton.jit
def table_distance(i, j, m0, n0, offset, queries):
    """Distances i - j within a tile, clamped to the entries of a table: 0 for future keys, and the
    last row's for rows past the last. `i` is relative to n0. Free where the result is not used."""
    return tl.maximum(tl.minimum(i, offset + queries - 1 - n0) - j, 0)


@triton.jit
def kept(seed, item, query, key, threshold, M: tl.constexpr, N: tl.constexpr):
    """Dropout: [M, N] booleans for the queries from `query` on and the keys from `key` on, true
    with probability threshold / 2^24. `key` must be a multiple of 4.

    Philox in counter mode: a score's bits depend only on the seed, its sequence and head (`item`),
    its query and its key, not on the tiling, so every pass draws the same mask. One call of the
    generator serves four keys.
    """
    counter_query = tl.broadcast_to((query + tl.arange(0, M))[:, None], (M, N // 4))
    counter_key = tl.broadcast_to((key // 4 + tl.arange(0, N // 4))[None, :], (M, N // 4))
    counter_item = tl.zeros_like(counter_key) + item
    none = tl.zeros_like(counter_key)
    a, b, c, d = tl.philox(seed, counter_key, counter_query, counter_item, none)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(M, N)
    return (bits >> 8).to(tl.int32) < threshold
