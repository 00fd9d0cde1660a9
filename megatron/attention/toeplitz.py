"""Kernels of the distance as views: a vector over distances stands in for a matrix.

A block of R query rows ends at query position n - 1 and sees the n keys 0 ... n - 1. Its keys are
kept in REVERSED order, column c holding key n - 1 - c, so that row r and column c are at distance

    d = r + c - (R - 1)

which depends on r + c alone. Two things follow, both without an index and without a copy:

- the matrix of a kernel is a view with strides (1, 1) of its vector, and R - 1 leading entries of
  -inf (distances < 0, the future) make it the causal mask as well;
- in a contiguous [R, n] matrix that is zero in the future, all entries at distance d < n - 1 lie in
  column d of the view of row pitch n - 1 that starts R - 1 entries in: what does not fit in a row
  of the view falls on zeros. Summing the matrix along its diagonals is then one plain sum over
  rows. The entry left over, the last row's last, is the only one at distance n - 1.

Legend: B batch, H heads, S distances, R rows, n keys of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DistanceVector:
    """The values of a kernel at distances 0 ... S-1, ready to be viewed as blocks of rows.

    Args:
        values_HS: the kernel's vector.
        max_rows: the largest number of rows of a block.
        future: value at negative distances.
    """

    def __init__(self, values_HS: Tensor, max_rows: int, future: float):
        self.max_rows = max_rows
        padded_HX = torch.nn.functional.pad(values_HS, (max_rows - 1, 0), value=future)
        self.padded_HX = padded_HX.contiguous()  # one row is not padded, so not copied either

    def block(self, heads: slice, rows: int, keys: int) -> Tensor:
        """View [heads, rows, keys] of the block of ``rows`` rows that ends at query keys - 1."""
        part = self.padded_HX[heads, self.max_rows - rows :]
        return part.as_strided((part.shape[0], rows, keys), (part.stride(0), 1, 1))


def add_diagonal_sums(total_HS: Tensor, matrix_BHRn: Tensor) -> None:
    """Add to ``total_HS[h, d]`` the sum of a block over its batch and its entries at distance d.

    ``matrix_BHRn`` must be contiguous with keys reversed, R <= n, and exactly 0 in the future. The
    order of summation is fixed by the shapes, so the result is repeatable bit for bit.
    """
    matrix_HRn = matrix_BHRn[0] if len(matrix_BHRn) == 1 else matrix_BHRn.sum(0)
    heads, rows, keys = matrix_HRn.shape
    if keys > 1:
        by_distance = matrix_HRn.as_strided(
            (heads, rows, keys - 1),
            (rows * keys, keys - 1, 1),
            matrix_HRn.storage_offset() + rows - 1,
        )
        total_HS[:, : keys - 1] += by_distance.sum(1)
    total_HS[:, keys - 1] += matrix_HRn[:, -1, -1]
