"""Define the dropout mask of the Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def kept(seed, item, query, key, threshold, M: tl.constexpr, N: tl.constexpr):
    """Return the dropout mask of a tile of scores, true for each weight that is kept."""
    # Philox in counter mode, with the key, the query and the pair (sequence, head) as counters.
    # So every Triton kernel draws the same mask, whatever its tile sizes. One call yields bits
    # for four keys, so `key` must be a multiple of 4.
    counter_query = tl.broadcast_to((query + tl.arange(0, M))[:, None], (M, N // 4))
    counter_key = tl.broadcast_to((key // 4 + tl.arange(0, N // 4))[None, :], (M, N // 4))
    counter_item = tl.zeros_like(counter_key) + item
    none = tl.zeros_like(counter_key)
    a, b, c, d = tl.philox(seed, counter_key, counter_query, counter_item, none)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(M, N)
    # A weight is kept with the probability threshold / 2^24.
    return (bits >> 8).to(tl.int32) < threshold
