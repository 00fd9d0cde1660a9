"""Represent a distance kernel's matrices as views of a vector over distances.

A distance kernel is a bias or a factor that depends only on the query-key distance. The R query
rows of a block are in REVERSED order: row r of a block that ends at query n - 1 is query n - 1 - r.
The columns are the keys 0 ... n - 1. Hence row r and column c are at distance

    d = n - 1 - (r + c)

which depends only on r + c. Therefore two operations need neither an index tensor nor a copy:

- Expanding a vector over distances to a matrix. Store the values in order of falling distance,
  followed by R - 1 entries -inf for distances < 0 (future keys). The matrix is a view of this
  vector with strides (1, 1), and it is also the causal mask.
- Summing the entries of a matrix at each distance. Let a contiguous [R, n] matrix be zero at future
  keys. Skip its first entry, which is the only entry at distance n - 1. Read the entries that
  follow as R rows of n - 1 entries. (The last R - 1 entries are then left out. They are for future
  keys.) Then column n - 2 - d contains all entries at distance d, and apart from them only zeros.
  So one plain sum over rows gives the sums for all distances.

(Reversing the keys instead of the queries would be less exact. A row would then start with its
nearest keys, and in the softmax's running sum their large weights would absorb the small weights
that follow. The errors would be near 5e-5 in fp32 at 65,536 keys, instead of 5e-7.)

Legend: B batch, H heads, S distances, R rows, n keys of a block.
"""

import torch
from torch import Tensor


class DistanceVector:
    """A vector over query-key distances, which can be viewed as a matrix of queries and keys.

    Args:
        values_HS: The values at distances 0 ... S-1, [heads, S].
        max_rows: The largest number of queries in a matrix.
        future: The value at negative distances, that is, for future keys.
    """

    def __init__(self, values_HS: Tensor, max_rows: int, future: float):
        self.length = values_HS.shape[1]
        # flip and pad keep strides, but the views need rows that are contiguous.
        reversed_HS = values_HS.flip(1)
        padded_HX = torch.nn.functional.pad(reversed_HS, (0, max_rows - 1), value=future)
        self.padded_HX = padded_HX.contiguous()

    def block(self, heads: slice, rows: int, keys: int) -> Tensor:
        """Return the vector's value at the distance of each pair of query and key.

        The result is a view [heads, queries, keys] of the vector. Row 0 of the view is the last
        query, which is at the position of the last key.
        """
        some_HX = self.padded_HX[heads, self.length - keys :]
        return some_HX.as_strided((some_HX.shape[0], rows, keys), (some_HX.stride(0), 1, 1))


def add_diagonal_sums(reversed_HS: Tensor, matrix_BHRn: Tensor) -> None:
    """Add the sum of each diagonal of `matrix_BHRn` to `reversed_HS`.

    A diagonal consists of all pairs of a query and a key at the same distance, in all sequences.

    Args:
        reversed_HS: The sums so far [heads, S], changed in place. S is the number of distances. The
            sum for distance d has the index S - 1 - d.
        matrix_BHRn: A contiguous tensor [batch, heads, queries, keys]. Its entries for future keys
            must be 0. The last query comes first.
    """
    matrix_HRn = matrix_BHRn[0] if len(matrix_BHRn) == 1 else matrix_BHRn.sum(0)
    # The order of summation depends only on the shapes, so the result is repeatable bit for bit.
    heads, rows, keys = matrix_HRn.shape
    first = reversed_HS.shape[1] - keys
    reversed_HS[:, first] += matrix_HRn[:, 0, 0]
    if keys > 1:
        diagonals_HRx = matrix_HRn.as_strided(
            (heads, rows, keys - 1), (rows * keys, keys - 1, 1), matrix_HRn.storage_offset() + 1
        )
        reversed_HS[:, first + 1 :] += diagonals_HRx.sum(1)
