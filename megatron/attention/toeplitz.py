"""Kernels of distance as views: a vector over distances replaces a matrix.

The R query rows of a block are in REVERSED order: row r of a block that ends at query n - 1 is
query n - 1 - r. With the keys 0 ... n - 1 as columns, row r and column c are at distance

    d = n - 1 - (r + c)

which depends only on r + c. Two things follow, both without an index and without a copy:

- the matrix of a kernel is a view with strides (1, 1) of its reversed vector, and R - 1 entries of
  -inf after it (distances < 0, the future) make it the causal mask as well;
- in a contiguous [R, n] matrix that is zero in the future, all entries at distance d < n - 1 lie in
  column n - 2 - d of the view of row pitch n - 1 that starts one entry in: what does not fit in a
  row of the view falls on zeros. Summing the matrix along its diagonals is then one plain sum over
  rows. The entry left over, the very first, is the only one at distance n - 1.

(Reversing the keys would work too, but a row would then start with its nearest keys. Their large
weights absorb the small ones that follow in the softmax's running sum: errors near 5e-5 in fp32 at
65,536 keys, against 5e-7 with reversed queries.)

Legend: B batch, H heads, S distances, R rows, n keys of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DistanceVector:
    """The values of a kernel at distances 0 ... S-1, which can be viewed as blocks of rows.

    Args:
        values_HS: the kernel's vector.
        max_rows: the largest number of rows of a block.
        future: value at negative distances.
    """

    def __init__(self, values_HS: Tensor, max_rows: int, future: float):
        self.length = values_HS.shape[1]
        # flip and pad keep strides, but the views need rows without gaps.
        reversed_HS = values_HS.flip(1)
        padded_HX = torch.nn.functional.pad(reversed_HS, (0, max_rows - 1), value=future)
        self.padded_HX = padded_HX.contiguous()

    def block(self, heads: slice, rows: int, keys: int) -> Tensor:
        """View [heads, rows, keys] of the block of `rows` rows that ends at query keys - 1."""
        some_HX = self.padded_HX[heads, self.length - keys :]
        return some_HX.as_strided((some_HX.shape[0], rows, keys), (some_HX.stride(0), 1, 1))


def add_diagonal_sums(reversed_HS: Tensor, matrix_BHRn: Tensor) -> None:
    """Add a block's sums over its batch and along its diagonals: distance d to entry S - 1 - d.

    `matrix_BHRn` must be contiguous with rows reversed, R <= n, and exactly 0 in the future. The
    shapes fix the order of summation, so the result is repeatable bit for bit.
    """
    matrix_HRn = matrix_BHRn[0] if len(matrix_BHRn) == 1 else matrix_BHRn.sum(0)
    heads, rows, keys = matrix_HRn.shape
    first = reversed_HS.shape[1] - keys
    reversed_HS[:, first] += matrix_HRn[:, 0, 0]
    if keys > 1:
        diagonals_HRx = matrix_HRn.as_strided(
            (heads, rows, keys - 1),
            (rows * keys, keys - 1, 1),
            matrix_HRn.storage_offset() + 1,
        )
        reversed_HS[:, first + 1 :] += diagonals_HRx.sum(1)
