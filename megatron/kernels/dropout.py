"""Define the dropout mask of the Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def kept(seed, item, query, key, threshold, M: tl.constexpr, N: tl.constexpr):
    """Return the dropout mask of M queries and N keys, [M, N].

    The queries start at index `query`, and the keys start at `key`, which must be a multiple of 4.
    An entry is true if the softmax weight is kept, which has the probability `threshold` / 2^24.

    The random generator is Philox in counter mode. Its counters are the key, the query and `item`,
    the number of the pair (sequence, head). Therefore the mask does not depend on the tile sizes,
    and every Triton kernel draws the same mask. One call of the generator yields bits for four
    keys.
    """
    counter_query = tl.broadcast_to((query + tl.arange(0, M))[:, None], (M, N // 4))
    counter_key = tl.broadcast_to((key // 4 + tl.arange(0, N // 4))[None, :], (M, N // 4))
    counter_item = tl.zeros_like(counter_key) + item
    none = tl.zeros_like(counter_key)
    a, b, c, d = tl.philox(seed, counter_key, counter_query, counter_item, none)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(M, N)
    return (bits >> 8).to(tl.int32) < threshold
