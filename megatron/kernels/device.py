"""Define device functions that all Triton kernels share: fast functions, loads, distances.

On a GPU, `lg2` and `rcp` are single instructions. Their relative error is about 2^-22, and they
flush subnormal numbers to zero. (`tl.log2` is a software routine of more than 20 instructions.) In
Triton's interpreter, `lg2` and `rcp` call numpy's functions.

Legend: M query rows, N keys of a tile, E head size, P the smallest power of two >= max(E, 16).
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether `@triton.jit` makes functions for Triton's interpreter, fixed at Triton's import."""

LOG2_ZERO = tl.constexpr(-1e30)
"""A finite replacement L of lg2(0), such that 2^(p L) = 0 and 2^(p L) L = 0 for p > 0."""

_TURN = (  # to add and subtract 1.5 * 2^23 rounds to a whole number
    "{ .reg .f32 n, t; fma.rn.f32 n, $1, 0f3E22F983, 0f4B400000; sub.rn.f32 n, 0f4B400000, n; "
    "fma.rn.f32 t, $1, 0f3E22F983, n; fma.rn.f32 t, $1, 0f31DC9C88, t; "
    "add.rn.f32 n, t, 0f4B400000; sub.rn.f32 n, n, 0f4B400000; sub.rn.f32 t, t, n; "
    "mul.rn.f32 t, t, 0f40C90FDB; "
)
COSINE = tl.constexpr(_TURN + "cos.approx.ftz.f32 $0, t; }")
SINE = tl.constexpr(_TURN + "sin.approx.ftz.f32 $0, t; }")


@triton.jit
def instruction(text: tl.constexpr, x):
    """Apply one PTX instruction to each number of x, and return the results."""
    return tl.inline_asm_elementwise(
        text,  # pyright: ignore[reportArgumentType] a constexpr str
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def lg2(x):
    return tl.log2(x) if INTERPRETED else instruction("lg2.approx.ftz.f32 $0, $1;", x)


@triton.jit
def lg2_or_finite(x):
    """Return log2 x, with a finite result for x = 0."""
    if INTERPRETED:
        return tl.where(x > 0.0, tl.log2(tl.where(x > 0.0, x, 1.0)), LOG2_ZERO)
    else:
        return tl.maximum(lg2(x), LOG2_ZERO)


@triton.jit
def rcp(x):
    """Return 1 / x for 1e-19 < |x| < 1e19, and 0 for larger |x|."""
    if INTERPRETED:
        return 1.0 / x
    else:
        # Two numbers a and b are inverted by one instruction, r = 1 / (a b), and two products:
        # 1/a = r b and 1/b = r a. The GPU's unit for special functions, which executes the
        # instruction, is the bottleneck of the Triton kernels.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 r; mul.f32 r, $2, $3; rcp.approx.ftz.f32 r, r; "
            "mul.f32 $0, r, $3; mul.f32 $1, r, $2; }",
            "=&f,=&f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def rcp_any(x):
    """Return 1 / x for every x, including infinities."""
    return 1.0 / x if INTERPRETED else instruction("rcp.approx.ftz.f32 $0, $1;", x)


@triton.jit
def ex2(x):
    return tl.exp2(x) if INTERPRETED else instruction("ex2.approx.ftz.f32 $0, $1;", x)


@triton.jit
def cosine(x):
    """Return the cosine of x with an error below 1.2e-6, for |x| < 2e7."""
    # First, whole turns n are subtracted: t = x / (2 pi) - n, with 1 / (2 pi) as the sum of two
    # fp32 constants. Then the error of the GPU's cosine instruction is at most 2^-20.5. The code
    # of `tl.cos` for large x needs local memory for each thread.
    return tl.cos(x) if INTERPRETED else instruction(COSINE, x)


@triton.jit
def sine(x):
    """Return the sine of x with an error below 1.2e-6, for |x| < 2e7."""
    return tl.sin(x) if INTERPRETED else instruction(SINE, x)


@triton.jit
def opaque(x):
    """Return x unchanged, but hide from the compiler how x was computed."""
    if INTERPRETED:
        return x
    else:
        # This prevents two optimisations that would make the Triton kernels slower. The compiler
        # would start the accumulators of query-key products with the bias that is added later,
        # instead of 0. The bias of the whole tile would then occupy registers during the matrix
        # product. And the compiler would let the last matrix product of a loop's iteration
        # overlap with the next iteration. On Hopper, the assembler ptxas would then make the
        # program wait after every matrix product (warning C7515).
        return tl.inline_asm_elementwise(
            "", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def load_rows(
    base, first, limit, stride, MASKED: tl.constexpr, ROWS: tl.constexpr,
    E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Load rows of a matrix, and pad them with zeros."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, P)
    # The offset of row `first` is 64-bit, because the row may be gigabytes after `base`.
    pointers = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    # The matrix has `limit` rows and E columns. Without MASKED, all loaded rows must exist.
    there = row[:, None] < limit - first if MASKED else None
    if E < P:
        there = column[None, :] < E if there is None else there & (column[None, :] < E)
    return tl.load(pointers) if there is None else tl.load(pointers, mask=there, other=0.0)


@triton.jit
def store_rows(
    base, tile, first, limit, stride, ROWS: tl.constexpr, E: tl.constexpr, P: tl.constexpr
):
    """Store a tile as rows of a matrix, without the tile's padding."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, P)
    pointers = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + column[None, :])
    there = (row[:, None] < limit - first) & (column[None, :] < E)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=there)


@triton.jit
def table_distance(i, j, m0, n0, offset, queries):
    """Return the query-key distances of a tile, as indices into a table over distances.

    All indices must exist in the table. Therefore future keys get the distance 0, and rows past the
    last query get the distances of the last query.
    """
    # `i` and `j` count from the tile's first key, at position n0. Without a table, the result is
    # not used, and the compiler removes this code.
    return tl.maximum(tl.minimum(i, offset + queries - 1 - n0) - j, 0)


@triton.jit
def spread(start, SHARED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return two tiles whose difference is the query-key distance of each score.

    The score in row r and column c is at distance start + r - c.
    """
    r = tl.arange(0, M)[:, None]
    c = tl.arange(0, N)[None, :]
    # a - b = start + r - c. With SHARED, entries of a thread with the same a - b also have the
    # same a and the same b, so the compiler evaluates the bias and the factor only once for them.
    # On tensor cores, the entries of a thread are in the rows r and r + 8, and in two
    # neighbouring columns of every eight. Therefore a has two values in a thread, and b is a
    # constant for each register. For example, a thread has 32 entries of a tile [64, 64], but
    # only 18 values of a - b.
    if SHARED:
        # Bit 0 of c is a constant, too. The compiler sees this only if it stands alone.
        a, b = start + (r & ~8) - (c & 6) - (c & 1), (c & ~7) - (r & 8)
    else:
        a, b = start + r, c
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def add_columns(sums, x, dtype: tl.constexpr):
    """Add column n of the tile `x` to column n mod W of `sums`, for all n. `sums` has W columns."""
    # In fp32, threads exchange their sums, and two threads could get different ones. A thread
    # rounds its own product before it sends it. But it could add a received number to its own
    # product before rounding (a fused multiply-add).
    if dtype == tl.float32:
        x = opaque(x)
    M: tl.constexpr = x.shape[0]
    W: tl.constexpr = sums.shape[1]
    # Column n is added to column n mod W. With W = 8, no thread needs numbers of another thread:
    # the columns of a tensor core's tile are distributed over threads in a pattern of 8.
    return sums + tl.sum(x.reshape(M, x.shape[1] // W, W), axis=1)
