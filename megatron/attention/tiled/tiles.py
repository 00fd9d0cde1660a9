"""Define tiles: the queries and heads for which blocked attention is computed together.

A tile consists of R query rows of some heads, and of the n keys from the first to the last that any
of these queries sees. Documents and windows make tiles narrower. The tile's scores are [sequences,
heads, R, n]. A tile should be small enough for its scores to stay in the processor's cache while
half a dozen operations read them. It should be large enough to hide the cost of calling these
operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass

BUFFER_ELEMENTS = 1 << 20
"""The number of scores in a tile (4 MB in fp32). If this number is made four times smaller or
larger, the measured time changes by at most 10%."""
MIN_ROWS, MAX_ROWS = 32, 128
MAX_ROW_ELEMENTS = 1 << 23
"""The largest number of scores of one head in a tile (32 MB in fp32). If rows are very long, this
limit reduces the number R of rows."""


@dataclass(frozen=True)
class QueryTile:
    """Some queries of some heads, and the keys that they see.

    A tile has all heads of several sequences, or some heads of one sequence.

    Attributes:
        index: The number of the tile, counted from 0.
        start: The number of scores in all earlier tiles.
        batch: The number of sequences in the tile.
        heads: The tile's heads.
        items: The tile's pairs of sequence and head, as a slice of all pairs.
        rows: The tile's queries, counted from the last query of a sequence to its first.
        first: The tile's first key.
        keys: The number of the tile's keys. The last key has the position of the tile's latest
            query.
        mixed: Whether the queries belong to several documents, so that scores need a mask.
    """

    index: int
    start: int
    batch: int
    heads: slice
    items: slice
    rows: slice
    first: int
    keys: int
    mixed: bool

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def seen(self) -> slice:
        """The tile's keys, as a slice of all keys."""
        return slice(self.first, self.first + self.keys)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape [batch, heads, queries, keys] of the tile's scores."""
        return self.batch, self.num_heads, self.num_rows, self.keys

    @property
    def size(self) -> int:
        """The number of scores of the tile."""
        return self.batch * self.num_heads * self.num_rows * self.keys


def block_rows(queries: int, keys: int) -> int:
    """Return the number of queries in a tile, usually 32 to 128."""
    # two tiles or more, so that early queries skip the keys that only later queries see
    rows = min(max(MIN_ROWS, -(-queries // 2)), MAX_ROWS)
    return max(1, min(rows, queries, MAX_ROW_ELEMENTS // keys))


def walk(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    starts: list[list[int]] | None = None,
    window: int | None = None,
) -> Iterator[QueryTile]:
    """Yield all tiles of the scores, in an order that depends only on the arguments.

    The last query must be at the position of the last key.

    Args:
        batch: The number of sequences.
        heads: The number of heads.
        queries: The number of queries in a sequence.
        keys: The number of keys in a sequence.
        starts: The first key of each query's document, one list for each sequence. The last query
            comes first. None means that each sequence is one document.
        window: The largest distance at which a query sees a key. None means any distance.
    """
    rows = block_rows(queries, keys)
    window = keys if window is None else window
    alike = [(0, batch, [0] * queries)]
    if starts is not None:  # each sequence has its own documents, so it has its own tiles
        alike = [(b, b + 1, own) for b, own in enumerate(starts)]
    index = start = 0
    for b_first, b_last, own in alike:
        strips = _strips(rows, keys, own, window)
        items = max(1, BUFFER_ELEMENTS // (rows * max(n for _, _, n, _ in strips)))
        batch_step, head_step = max(1, items // heads), min(items, heads)
        for b in range(b_first, b_last, batch_step):
            b_end = min(b + batch_step, b_last)
            for h in range(0, heads, head_step):
                h_end = min(h + head_step, heads)
                # This is contiguous in B H, since a tile of several sequences has all their heads.
                items_slice = slice(b * heads + h, (b_end - 1) * heads + h_end)
                for strip in strips:
                    tile = QueryTile(index, start, b_end - b, slice(h, h_end), items_slice, *strip)
                    yield tile
                    index, start = index + 1, start + tile.size


def _strips(
    rows: int, keys: int, starts: list[int], window: int
) -> list[tuple[slice, int, int, bool]]:
    """Divide the queries of one head into tiles.

    Args:
        rows: The largest number of queries in a tile.
        keys: The number of keys.
        starts: The first key of each query's document. The last query comes first.
        window: The largest distance at which a query sees a key.

    Returns:
        One tuple for each tile: the attributes `rows`, `first`, `keys` and `mixed` of `QueryTile`.
    """
    strips, r = [], 0
    while r < len(starts):
        end = min(r + rows, len(starts))
        whole = keys - starts[r]  # row r's document ends before this row
        if whole - r >= MIN_ROWS:  # otherwise the tile would be too small to be efficient
            end = min(end, whole)
        first = max(starts[end - 1], keys - end - window)
        strips.append((slice(r, end), first, keys - r - first, starts[r] > first))
        r = end
    return strips
