"""Test the parts of blocked attention: matrices as views, diagonal sums, the walk over tiles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.attention.tiled import tiles
from megatron.attention.tiled.toeplitz import DistanceVector, add_diagonal_sums


def distances(rows: int, keys: int) -> torch.Tensor:
    """Return distances [rows, keys] of a block whose rows are the queries keys-1, keys-2, ..."""
    query = torch.arange(keys - rows, keys).flip(0)[:, None]
    return query - torch.arange(keys)


@given(
    rows=st.integers(1, 9),
    before=st.integers(0, 12),
    longer=st.integers(0, 4),
    more_rows=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_block_of_a_distance_vector(rows, before, longer, more_rows, transposed):
    keys = rows + before
    values = torch.randn(3, keys + longer)
    if transposed:  # the same numbers, laid out otherwise
        values = values.T.contiguous().T
    vector = DistanceVector(values, rows + more_rows, future=-torch.inf)
    d = distances(rows, keys)
    expected = values[:, d.clamp(min=0)].masked_fill(d < 0, -torch.inf)
    assert torch.equal(vector.block(slice(0, 3), rows, keys), expected)
    assert torch.equal(vector.block(slice(1, 2), rows, keys), expected[1:2])
    # A view of the vector: nothing was copied.
    block = vector.block(slice(0, 3), rows, keys)
    assert block.untyped_storage().data_ptr() == vector.padded_HX.untyped_storage().data_ptr()


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    rows=st.integers(1, 9),
    before=st.integers(0, 12),
    shifted=st.integers(0, 5),
)
def test_diagonal_sums(batch, heads, rows, before, shifted):
    keys = rows + before
    d = distances(rows, keys)
    numbers = torch.randint(-50, 50, (shifted + batch * heads * rows * keys,)).double()
    matrix = numbers[shifted:].view(batch, heads, rows, keys)
    matrix.masked_fill_(d < 0, 0.0)
    total = torch.ones(heads, keys + 2).double()
    expected = total.clone()
    for distance in range(keys):
        expected[:, distance] += matrix[:, :, d == distance].sum((0, 2))
    add_diagonal_sums(total, matrix)
    assert torch.equal(total.flip(1), expected)


@given(
    batch=st.integers(1, 9),
    heads=st.integers(1, 13),
    queries=st.integers(1, 700),
    offset=st.integers(0, 100_000),
)
def test_walk_covers_every_row_once(batch, heads, queries, offset):
    keys = offset + queries
    seen = torch.zeros(batch * heads, queries, dtype=torch.long)
    rows_limit = tiles.block_rows(queries, keys)
    for index, tile in enumerate(tiles.walk(batch, heads, queries, keys)):
        seen[tile.items, tile.rows] += 1
        items = torch.arange(batch * heads)[tile.items].view(tile.batch, tile.num_heads) % heads
        assert (items == torch.arange(heads)[tile.heads]).all()
        assert tile.index == index and tile.num_rows <= rows_limit
        assert tile.keys == keys - tile.rows.start
        assert tile.batch == 1 or tile.num_heads == heads
        cells = tile.batch * tile.num_heads * tile.num_rows * tile.keys
        alone = tile.batch * tile.num_heads == 1
        assert cells <= (tiles.MAX_ROW_ELEMENTS if alone else tiles.BUFFER_ELEMENTS)
    assert (seen == 1).all()


def test_rows_of_a_block():
    assert [tiles.block_rows(n, n) for n in (1, 20, 40, 128, 512)] == [1, 20, 32, 64, 128]
    assert tiles.block_rows(1 << 20, 1 << 20) == 8
    assert tiles.block_rows(5, 1 << 30) == 1
