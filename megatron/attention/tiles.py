"""The walk of the blocked attention: which queries of which heads are computed together.

A tile is R query rows of some heads, with the n keys that the last of these queries sees. Its
scores [sequences, heads, R, n] should stay in the processor's cache while half a dozen operations
read them, and be large enough to hide the cost of calling those operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BUFFER_ELEMENTS = 1 << 20
"""Scores of a tile: 4 MB in fp32. Measured: a quarter and four times that differ by at most 10%."""
MIN_ROWS, MAX_ROWS = 32, 128
MAX_ROW_ELEMENTS = 1 << 23
"""One head's R x S never exceeds this (32 MB in fp32): R is smaller where rows are very long."""


@dataclass(frozen=True)
class QueryTile:
    """Some query rows of some heads of one sequence, or of all heads of several sequences.

    Attributes:
        index: counts the tiles; fixes the dropout mask.
        start: number of scores of all earlier tiles.
        batch: how many sequences.
        heads: which of the H heads, the same in each sequence.
        items: sequences and heads together, as a slice of the flattened B H.
        rows: which of the T queries, counted from the last one.
        keys: n; the tile's first row is its last query, which sees keys 0 ... n-1.
    """

    index: int
    start: int
    batch: int
    heads: slice
    items: slice
    rows: slice
    keys: int

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, heads, rows, keys]."""
        return self.batch, self.num_heads, self.num_rows, self.keys

    @property
    def size(self) -> int:
        """Number of scores."""
        return self.batch * self.num_heads * self.num_rows * self.keys


def block_rows(queries: int, keys: int) -> int:
    """R: 32 to 128 for efficient products, but at most half of the queries if these are enough, so
    that some future keys are never computed, and fewer where rows are very long."""
    rows = min(max(MIN_ROWS, -(-queries // 2)), MAX_ROWS)
    return max(1, min(rows, queries, MAX_ROW_ELEMENTS // keys))


def walk(batch: int, heads: int, queries: int, keys: int) -> Iterator[QueryTile]:
    """All tiles, in an order that depends only on the shapes; the last query sees the last key."""
    rows = block_rows(queries, keys)
    items = max(1, BUFFER_ELEMENTS // (rows * keys))
    batch_step, head_step = max(1, items // heads), min(items, heads)
    index = start = 0
    for b in range(0, batch, batch_step):
        b_end = min(b + batch_step, batch)
        for h in range(0, heads, head_step):
            h_end = min(h + head_step, heads)
            # Contiguous in B H, since a tile of several sequences has all their heads.
            items_slice = slice(b * heads + h, (b_end - 1) * heads + h_end)
            for r in range(0, queries, rows):
                r_slice = slice(r, min(r + rows, queries))
                h_slice, n = slice(h, h_end), keys - r
                tile = QueryTile(index, start, b_end - b, h_slice, items_slice, r_slice, n)
                yield tile
                index, start = index + 1, start + tile.size
