"""List the tile sizes, warps and pipeline stages of each Triton kernel.

The sizes were chosen without a GPU, from the compiler's report (`tools/compile_kernels.py`), by
these rules:

- Tiles are as large as possible, but their scores, products and accumulators must fit into
  registers.
- Each group of 4 warps computes 64 query rows or 64 keys, because a Hopper matrix product is 64
  rows high. With more warps per 64 rows, scores would be computed twice.
- Two programs share a multiprocessor if both fit, so that the special functions of one program
  overlap with the matrix products of the other.
- Hopper's matrix products must not wait for each other. `tests/ptx/serial.py` reports waits.

If measured times suggest other sizes, only `TABLE` needs to change. Nothing is tuned at start-up.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from megatron.kernels.device import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """The number of query rows M and keys N that a Triton kernel handles at a time.

    Attributes:
        warps: The number of warps of a program.
        stages: The number of pipeline stages of its loop.
    """

    M: int
    N: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TileSizes:
    """The tile sizes of the Triton kernels.

    Attributes:
        forward: The tile of the kernel that computes the output.
        query: The tile of the kernel that computes the gradient of the queries.
        key: The tile of the kernel that computes the gradients of the keys and the values.
        table: The tile of the kernel that computes the gradient of a table over distances. This
            tile is square, with M queries and M keys.
    """

    forward: Tile
    query: Tile
    key: Tile
    table: Tile


class Needs(NamedTuple):
    """The properties of an attention call that determine how many registers are needed.

    Attributes:
        heavy: Whether the positional embedding is costly to compute.
        dropout: Whether there is dropout.
        columns: The number of the embedding's parameters per head.
        terms: Whether there are documents, a window, a sink or a decay.
        layer: Whether the embedding contains a layer of hidden units.
    """

    heavy: bool = False
    dropout: bool = False
    columns: int = 0
    terms: bool = False
    layer: bool = False


def sizes(*four: tuple[int, int, int, int]) -> TileSizes:
    """Return a `TileSizes` object, given the tuple (M, N, warps, stages) of each kernel."""
    return TileSizes(*(Tile(*each) for each in four))


SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}
"""Shared memory in bytes that a program may use, by GPU family.

80 is the A100, 86 is other Ampere GPUs and Ada, 90 is Hopper, and 100 is Blackwell (10.x)."""

SMALL = Tile(16, 16, 4, 1)
"""The tile for Triton's interpreter. It is small, so that small test inputs have many tiles."""

FP32 = {  # fp32 matrix products do not run on tensor cores, and their operands are in registers
    (4, 64, False): sizes((64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 4, 1), (32, 32, 8, 1)),
    (4, 128, False): sizes((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
    (4, 256, False): sizes((16, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
}
# GPU family: {(bytes of an element, largest padded head size P, heavy (see `Needs`)): tile sizes}
TABLE: dict[int, dict[tuple[int, int, bool], TileSizes]] = {
    90: {
        **FP32,
        (2, 64, False): sizes((64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 3), (64, 64, 8, 2)),
        (2, 64, True): sizes((128, 64, 8, 3), (128, 32, 8, 3), (64, 128, 8, 3), (64, 64, 8, 2)),
        (2, 128, False): sizes((128, 128, 8, 2), (128, 32, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2)),
        (2, 128, True): sizes((128, 64, 8, 2), (128, 32, 8, 2), (16, 128, 8, 2), (64, 64, 8, 2)),
        (2, 256, False): sizes((128, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    },
    80: {
        **FP32,
        (2, 64, False): sizes((128, 64, 8, 3), (128, 32, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2)),
        (2, 64, True): sizes((128, 64, 8, 3), (128, 32, 8, 2), (32, 128, 8, 1), (32, 32, 4, 2)),
        (2, 128, False): sizes((128, 32, 8, 2), (128, 16, 8, 2), (64, 64, 8, 2), (32, 32, 4, 1)),
        (2, 128, True): sizes((128, 32, 8, 2), (128, 16, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1)),
        (2, 256, False): sizes((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    },
}
TABLE[86] = TABLE[80] | {
    (2, 128, False): sizes((64, 32, 4, 2), (128, 16, 8, 2), (16, 128, 8, 1), (32, 32, 4, 1)),
    (2, 128, True): sizes((64, 32, 4, 2), (128, 16, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1)),
}
TABLE[100] = TABLE[90] | {  # without spills there
    (2, 64, False): sizes((64, 64, 4, 3), (64, 32, 4, 3), (32, 128, 8, 3), (64, 64, 8, 2)),
    (2, 64, True): sizes((128, 64, 8, 3), (128, 32, 8, 3), (32, 128, 8, 3), (64, 64, 8, 2)),
    (2, 128, False): sizes((128, 64, 8, 3), (128, 32, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2)),
    (2, 128, True): sizes((128, 32, 8, 3), (128, 32, 8, 2), (16, 128, 8, 2), (64, 64, 8, 2)),
}

SPECIAL: tuple[tuple[str, tuple[int, ...], int, dict[str, Tile]], ...] = (
    ("light terms", (90,), 64, {"key": Tile(64, 128, 8, 3)}),
    ("light terms", (90,), 128, {"forward": Tile(128, 64, 8, 3)}),
    ("heavy terms", (80,), 128, {"key": Tile(32, 64, 8, 1)}),
    ("dropout", (90,), 64, {"key": Tile(32, 128, 8, 3)}),
    ("dropout", (90,), 128, {"forward": Tile(128, 64, 8, 3), "query": Tile(64, 16, 4, 3)}),
    ("dropout", (80, 86), 64, {"forward": Tile(128, 32, 8, 3), "key": Tile(16, 128, 8, 1)}),
    ("heavy dropout", (86,), 128, {"query": Tile(128, 16, 8, 1)}),
    ("layer", (80, 90, 86), 64, {"forward": Tile(128, 32, 8, 3), "query": Tile(128, 16, 8, 3)}),
    ("layer", (80, 86), 64, {"query": Tile(128, 16, 8, 2), "key": Tile(16, 128, 8, 2)}),
    ("layer", (90,), 128, {"forward": Tile(128, 32, 8, 3), "query": Tile(128, 16, 8, 2)}),
    ("many columns", (90,), 128, {"query": Tile(128, 16, 8, 2)}),
    ("many columns", (80, 86), 128, {"query": Tile(32, 32, 4, 2)}),
    ("all", (90,), 128, {"forward": Tile(128, 32, 8, 3), "query": Tile(128, 16, 8, 2)}),
)
"""Tiles of 16-bit kernels that replace those of `TABLE`, the later ones those of earlier entries.

An entry is (a condition of `look_up`, GPU families, largest padded head size, tiles). With dropout,
kernels need still more registers than the heavy ones. The query pass sums the gradients of all
columns of theta in registers.
"""


def padded(head_size: int) -> int:
    """Return the head size, padded to a power of two of at least 16."""
    # Triton requires tile sizes that are powers of two, and matrix products over at least 16
    # terms.
    return max(16, 1 << (head_size - 1).bit_length())


def family(capability: tuple[int, int]) -> int:
    """Return a number for a family of GPUs. All GPUs of a family use the same tile sizes."""
    # They compute matrix products in the same way, with about the same amount of shared memory.
    if capability[0] in (9, 10):
        return 10 * capability[0]
    return 80 if capability in ((8, 0), (8, 7)) else 86


def choose(
    capability: tuple[int, int], dtype: torch.dtype, head_size: int, needs: Needs
) -> TileSizes:
    """Return the tile sizes for a GPU of this compute capability."""
    if INTERPRETED:
        return TileSizes(SMALL, SMALL, SMALL, SMALL)
    return look_up(family(capability), dtype.itemsize, padded(head_size), needs)


def few_rows(itemsize: int, head_size: int) -> Tile:
    """Return the tile sizes for attention of few queries to many keys."""
    # The keys or values of a tile fill about 8 kB.
    return Tile(16, max(16, min(64, 8192 // (itemsize * padded(head_size)))), 2, 3)


@lru_cache
def look_up(family: int, itemsize: int, size: int, needs: Needs) -> TileSizes:
    """Return the tile sizes from the table in this file.

    Args:
        family: The GPU family.
        itemsize: The number of bytes of an element of q, k and v.
        size: The padded head size.
        needs: Properties of the attention call.
    """
    # `heavy` is true with a factor w, a table, a layer of hidden units or more than two columns.
    heavy, dropout, columns, terms, layer = needs
    rows = TABLE[family]
    # The smallest head size in `TABLE` that is at least `size`.
    listed = min(key[1] for key in rows if key[0] == itemsize and key[1] >= size)
    # Without a separate entry, calls that are heavy or have dropout get the others' tile sizes.
    found = rows.get((itemsize, listed, heavy or dropout)) or rows[itemsize, listed, False]
    if itemsize != 2:
        return found
    near = min(family, 90)  # Blackwell has those of Hopper
    conditions = {
        "light terms": terms and not (heavy or dropout),
        "heavy terms": terms and (heavy or dropout),
        "dropout": dropout,
        "heavy dropout": heavy and dropout,
        "layer": layer,
        "many columns": columns > (4 if near == 90 else 3),
        "all": heavy and dropout and terms,
    }
    for condition, families, largest, tiles in SPECIAL:
        if conditions[condition] and near in families and largest == listed:
            found = replace(found, **tiles)
    if family == 100:  # with more stages, Triton 3.7.1 puts no fence between copies and products
        one = {name: replace(getattr(found, name), stages=1) for name in ("query", "key")}
        found = replace(found, **one)
    return found
