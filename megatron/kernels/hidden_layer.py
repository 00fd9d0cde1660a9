"""Evaluate a layer of hidden units in the Triton kernels: f(u) = sum_k v_k relu(w_k u + b_k).

f is piecewise linear (see `megatron.positional.hidden_layer`). The knees are the inputs u at which
the slope changes. Between neighbouring knees, f is a line, slope * u + offset. `launch` passes one
row of numbers per head to the kernels. This row contains the columns of theta, then the K knees in
rising order, then the slopes and then the offsets of the K + 1 lines. In most tiles, all inputs u
lie between the same two knees, so f costs one product per score. If knees lie between the smallest
and the largest u of a tile, a loop over these knees selects the line of each u. The loop is inside
a condition, to hide the loop from Triton. (Triton does not load tiles ahead in a loop that directly
contains another loop.)

Let ds be the gradient of the loss with respect to a logit. The gradient of a line's slope is the
sum of ds u over the scores whose u lies on this line, and the gradient of its offset is the sum of
ds over the same scores. `hidden_pass` computes these sums, without atomics and in fixed order.
Autograd propagates them to w, b and v. `hidden_pass` needs the delta that `query_pass` has stored.

Legend: see `backward`. K hidden units, R the smallest power of two above K.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from megatron.kernels.device import load_rows
from megatron.kernels.rows import gradients_of, kernel, open_head, open_rows, seen_by


@dataclass(frozen=True)
class Layer:
    """A hidden layer of ReLU units, as a bias of the logits: sum_k v_k relu(w_k u + b_k).

    u is a number for each logit, such as the query-key distance. The sum is piecewise linear in u.

    Attributes:
        first: The number of the embedding's parameters per head. In a head's row of numbers, the
            knees of the layer start at this index.
        columns: Three tuples: the indices of all w, of all b and of all v among these parameters.
    """

    first: int
    columns: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """The number of hidden units."""
        return len(self.columns[0])

    @property
    def others(self) -> list[int]:
        """The indices of the embedding's parameters that do not belong to the layer."""
        return [n for n in range(self.first) if all(n not in each for each in self.columns)]


@triton.jit
def knees_within(u, knees, K: tl.constexpr):
    """Return which knees of the layer lie between the smallest and the largest u of a tile.

    A knee is an input u at which the slope of the layer changes. The result (begin, end) means the
    knees begin ... end - 1.
    """
    R: tl.constexpr = triton.next_power_of_2(K)
    k = tl.arange(0, R)
    at = tl.load(knees + k, mask=k < K, other=float("inf"))
    lowest, highest = tl.min(u), tl.max(u)
    return tl.sum((at < lowest).to(tl.int32)), tl.sum((at < highest).to(tl.int32))


@triton.jit
def hidden_layer(u, row, first: tl.constexpr, K: tl.constexpr):
    """Return the output of a hidden layer of ReLU units for a tile of inputs u."""
    # `row` points to `first` columns of theta, then the layer's knees, slopes and offsets.
    knees, slopes, offsets = row + first, row + first + K, row + first + 2 * K + 1
    within = knees_within(u, knees, K)
    begin, end = within[0], within[1]
    f = tl.load(offsets + begin) + tl.load(slopes + begin) * u
    if begin < end:
        for k in tl.range(begin, end):
            after = tl.load(offsets + k + 1) + tl.load(slopes + k + 1) * u
            f = tl.where(u > tl.load(knees + k), after, f)
    return f


@triton.jit
def hidden_slope(u, row, first: tl.constexpr, K: tl.constexpr):
    """Return the derivative of a hidden layer of ReLU units, for a tile of inputs u."""
    knees, slopes = row + first, row + first + K
    within = knees_within(u, knees, K)
    begin, end = within[0], within[1]
    slope = tl.zeros_like(u) + tl.load(slopes + begin)
    if begin < end:
        for k in tl.range(begin, end):
            slope = tl.where(u > tl.load(knees + k), tl.load(slopes + k + 1), slope)
    return slope


@triton.jit
def add_by_line(sums, slopes, u, ds, knees, K: tl.constexpr, R: tl.constexpr):
    """Add a tile's contribution to the gradients of the lines of which the layer consists."""
    # Between the knees m - 1 and m, the layer is the line a_m * u + c_m. `sums` [R] contains the
    # gradients of all c_m, and `slopes` [R] the gradients of all a_m. `ds` are the gradients at
    # `u`.
    line = tl.arange(0, R)
    within = knees_within(u, knees, K)
    begin, end = within[0], within[1]
    rest, rest_u = tl.sum(ds), tl.sum(ds * u)
    if begin < end:
        for k in tl.range(begin, end):
            beyond = tl.where(u > tl.load(knees + k), ds, 0.0)
            next, next_u = tl.sum(beyond), tl.sum(beyond * u)
            sums += tl.where(line == k, rest - next, 0.0)
            slopes += tl.where(line == k, rest_u - next_u, 0.0)
            rest, rest_u = next, next_u
    return sums + tl.where(line == end, rest, 0.0), slopes + tl.where(line == end, rest_u, 0.0)


@kernel
def hidden_pass(
    q_ptr, k_ptr, v_ptr, do_ptr, sums_ptr, lse_ptr, delta_ptr, theta_ptr, seed_ptr,
    first_ptr, high_ptr, low_ptr, position_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    heads, group, queries, keys, offset, width, scale, threshold, rescale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr,
    DROPOUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a hidden layer of ReLU units."""
    # Each program handles M query rows of one head. It writes two rows of the tensor [programs,
    # 2, R] at `sums_ptr`: its sums for the offsets, then those for the slopes.
    tiles = tl.cdiv(queries, M)
    item, m0 = open_rows(tiles, M)
    head = open_head(
        item, k_ptr, v_ptr, theta_ptr, seed_ptr, k_b, k_h, k_t, v_b, v_h, v_t,
        heads, group, queries, keys, offset, width, scale, threshold, rescale, f_prepare, DROPOUT,
    )  # fmt: skip
    b, h = head.b, head.h
    q = load_rows(q_ptr + b * q_b + h * q_h, m0, queries, q_t, True, M, E, P)
    do = load_rows(do_ptr + b * do_b + h * do_h, m0, queries, do_t, True, M, E, P)
    per_row = item.to(tl.int64) * queries + m0 + tl.arange(0, M)
    there = m0 + tl.arange(0, M) < queries
    lse = tl.load(lse_ptr + per_row, mask=there, other=float("inf"))
    delta = tl.load(delta_ptr + per_row, mask=there, other=0.0)
    seen, terms = seen_by(head, m0, first_ptr, high_ptr, low_ptr, position_ptr, M, N)
    R: tl.constexpr = triton.next_power_of_2(K + 1)
    sums, slopes = tl.zeros([R], dtype=tl.float32), tl.zeros([R], dtype=tl.float32)
    for n0 in tl.range(seen.begin, seen.last, N):
        k = load_rows(head.k, n0, keys, k_t, True, N, E, P)
        v = load_rows(head.v, n0, keys, v_t, True, N, E, P)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        e, _, ds = gradients_of(
            s, dp, lse, delta, head, terms, m0, n0, f_evaluate, DROPOUT, False, True, M, N
        )
        sums, slopes = add_by_line(sums, slopes, e[2], ds, theta_ptr + h * width + FIRST, K, R)
    out = sums_ptr + tl.program_id(0).to(tl.int64) * (2 * R) + tl.arange(0, R)
    tl.store(out, sums)
    tl.store(out + R, slopes)
