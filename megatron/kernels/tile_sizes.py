"""Tile sizes, warps and pipeline stages of each pass: looked up, never searched for at start.

Chosen without a GPU, from what the compiler reports (``tools/compile_kernels.py``): the largest
tiles whose scores, products and accumulators stay in registers, 64 query rows or keys for each
group of 4 warps (a Hopper product is 64 rows high; wider groups compute scores twice), and room
for two programs on a multiprocessor where that is possible, so that the special functions of one
overlap with the products of the other. Measured times will change this table, and only it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.kernels.device import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """M query rows x N keys (``table``: M x M), warps of a program, stages of its loop."""

    M: int
    N: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Blocks:
    """The tile of each pass."""

    forward: Tile
    query: Tile
    key: Tile
    table: Tile


SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448}
"""Bytes that a program may have, by family: A100; other Ampere and Ada; Hopper and later."""

SMALL = Tile(16, 16, 4, 1)
"""For the interpreter: many tiles out of little data."""

# family: {(bytes of an element, at most this P, heavy kernel of distance): tiles}
TABLE: dict[int, dict[tuple[int, int, bool], Blocks]] = {
    90: {
        (2, 64, False): Blocks(
            Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 8, 2)
        ),
        (2, 64, True): Blocks(
            Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 8, 2)
        ),
        (2, 128, False): Blocks(
            Tile(128, 64, 8, 3), Tile(64, 32, 4, 3), Tile(32, 128, 8, 2), Tile(64, 64, 8, 2)
        ),
        (2, 128, True): Blocks(
            Tile(128, 64, 8, 2), Tile(64, 32, 4, 3), Tile(16, 128, 8, 2), Tile(64, 64, 8, 2)
        ),
        (2, 256, False): Blocks(
            Tile(128, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)
        ),
    },
    80: {
        (2, 64, False): Blocks(
            Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), Tile(64, 64, 8, 2)
        ),
        (2, 64, True): Blocks(
            Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 128, 8, 1), Tile(32, 32, 4, 2)
        ),
        (2, 128, False): Blocks(
            Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 4, 1)
        ),
        (2, 128, True): Blocks(
            Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 4, 1)
        ),
        (2, 256, False): Blocks(
            Tile(64, 32, 8, 1), Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)
        ),
    },
    86: {},
}
SINGLE = {  # fp32 products run on the ordinary units, from registers
    (4, 64, False): Blocks(
        Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)
    ),
    (4, 128, False): Blocks(
        Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)
    ),
    (4, 256, False): Blocks(
        Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)
    ),
}
for _family in TABLE.values():
    _family |= SINGLE
TABLE[86] |= {
    (2, 64, False): TABLE[80][2, 64, False],
    (2, 64, True): TABLE[80][2, 64, True],
    (2, 128, False): Blocks(
        Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 4, 1)
    ),
    (2, 256, False): Blocks(
        Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)
    ),
}


def padded(head_size: int) -> int:
    """P: Triton's tiles are powers of two, its products at least 16 deep."""
    return max(16, 1 << (head_size - 1).bit_length())


def family(capability: tuple[int, int]) -> int:
    """Row of the table: by generation, and by how much memory its programs share."""
    if capability[0] in (9, 10):
        return 90
    return 80 if capability in ((8, 0), (8, 7)) else 86


def choose(
    capability: tuple[int, int], dtype: torch.dtype, head_size: int, heavy: bool = False
) -> Blocks:
    """Tiles for a GPU, a dtype and a head size.

    Args:
        heavy: the kernel of distance multiplies, looks up a table, or has more than two parameters,
            or there is dropout: registers are needed for it.
    """
    if INTERPRETED:
        return Blocks(SMALL, SMALL, SMALL, SMALL)
    return look_up(TABLE[family(capability)], dtype.itemsize, padded(head_size), heavy)


def look_up(
    rows: dict[tuple[int, int, bool], Blocks], itemsize: int, size: int, heavy: bool
) -> Blocks:
    """The row for the smallest listed size that is no smaller than ``size``."""
    listed = min(key[1] for key in rows if key[0] == itemsize and key[1] >= size)
    return rows.get((itemsize, listed, heavy)) or rows[itemsize, listed, False]
