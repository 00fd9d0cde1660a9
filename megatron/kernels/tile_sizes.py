"""Tile sizes, warps and pipeline stages of each pass: looked up, never searched for at start-up.

They were chosen without a GPU, from the compiler's report (`tools/compile_kernels.py`):

- the largest tiles whose scores, products and accumulators stay in registers;
- 64 query rows or keys for each group of 4 warps, since a Hopper product is 64 rows high and larger
  groups compute scores twice;
- two programs on a multiprocessor where they fit, so that the special functions of one overlap with
  the products of the other.

When times are measured, only this table need change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.kernels.device import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """M query rows x N keys (`table`: M x M), warps of a program, stages of its loop."""

    M: int
    N: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TileSizes:
    """The tile of each pass."""

    forward: Tile
    query: Tile
    key: Tile
    table: Tile


_Four = tuple[int, int, int, int]


def sizes(forward: _Four, query: _Four, key: _Four, table: _Four) -> TileSizes:
    """Tile sizes, each tile as (M, N, warps, stages)."""
    return TileSizes(Tile(*forward), Tile(*query), Tile(*key), Tile(*table))


SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448}
"""Bytes that a program may use, by family: A100; other Ampere and Ada; Hopper and later."""

SMALL = Tile(16, 16, 4, 1)
"""For the interpreter: small inputs then have many tiles."""

# family: {(bytes of an element, at most this P, heavy kernel of distance): tiles}
TABLE: dict[int, dict[tuple[int, int, bool], TileSizes]] = {
    90: {
        (2, 64, False): sizes((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 8, 2)),
        (2, 64, True): sizes((128, 64, 8, 3), (128, 32, 8, 3), (64, 128, 8, 3), (64, 64, 8, 2)),
        (2, 128, False): sizes((128, 64, 8, 3), (64, 32, 4, 3), (32, 128, 8, 2), (64, 64, 8, 2)),
        (2, 128, True): sizes((128, 64, 8, 2), (64, 32, 4, 3), (16, 128, 8, 2), (64, 64, 8, 2)),
        (2, 256, False): sizes((128, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    },
    80: {
        (2, 64, False): sizes((128, 64, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2)),
        (2, 64, True): sizes((128, 64, 8, 3), (128, 32, 8, 2), (32, 128, 8, 1), (32, 32, 4, 2)),
        (2, 128, False): sizes((128, 32, 8, 2), (64, 32, 8, 2), (64, 64, 8, 2), (32, 32, 4, 1)),
        (2, 128, True): sizes((128, 32, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1)),
        (2, 256, False): sizes((64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    },
    86: {},
}
FP32 = {  # fp32 products run on the ordinary units, from registers
    (4, 64, False): sizes((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
    (4, 128, False): sizes((32, 32, 8, 1), (32, 16, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
    (4, 256, False): sizes((16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
}
for _family in TABLE.values():
    _family |= FP32
TABLE[86] |= {
    (2, 64, False): TABLE[80][2, 64, False],
    (2, 64, True): TABLE[80][2, 64, True],
    (2, 128, False): sizes((64, 32, 4, 2), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1)),
    (2, 256, False): sizes((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
}


def padded(head_size: int) -> int:
    """P: Triton's tile sizes are powers of two, and its products sum at least 16 terms."""
    return max(16, 1 << (head_size - 1).bit_length())


def family(capability: tuple[int, int]) -> int:
    """The key of TABLE for a GPU: by generation, and by the shared memory of a program."""
    if capability[0] in (9, 10):
        return 90
    return 80 if capability in ((8, 0), (8, 7)) else 86


def choose(
    capability: tuple[int, int], dtype: torch.dtype, head_size: int, heavy: bool = False
) -> TileSizes:
    """Tiles for a GPU, a dtype and a head size.

    Args:
        heavy: whether extra registers are needed: for dropout, or for a kernel of distance that
            multiplies, looks up a table, or has more than two parameters.
    """
    if INTERPRETED:
        return TileSizes(SMALL, SMALL, SMALL, SMALL)
    return look_up(TABLE[family(capability)], dtype.itemsize, padded(head_size), heavy)


def look_up(
    rows: dict[tuple[int, int, bool], TileSizes], itemsize: int, size: int, heavy: bool
) -> TileSizes:
    """The row of the smallest listed P that is at least `size`."""
    listed = min(key[1] for key in rows if key[0] == itemsize and key[1] >= size)
    return rows.get((itemsize, listed, heavy)) or rows[itemsize, listed, False]
