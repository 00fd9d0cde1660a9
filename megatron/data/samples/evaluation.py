"""Evaluation text of a given length: non-overlapping pieces of the documents in file order.

The documents of a split are one row of tokens x_0, x_1, ...; sequence i of length L is x[i L : i L
+ L + 1]: inputs x[i L : i L + L], targets one further, so that each of the tokens x_1 ... x_{n L}
is a target exactly once, whatever L. Lengths are then compared on the same text, of which only the
context differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.shards.reader import ShardReader


def eval_sequences(
    shards: ShardReader, documents: tuple[int, int], length: int, max_tokens: int
) -> np.ndarray:
    """int64 [n, length + 1]: sequences of documents [start, end) with n * length <= max_tokens.

    To have the same targets for several lengths, take `max_tokens` from `eval_span`. ShardError if
    there is not one whole sequence.
    """
    row = _row(shards, documents)
    n = min(max_tokens, len(row) - 1) // length
    if n < 1:
        raise ShardError(
            f"{shards.prefix}: documents {documents[0]} to {documents[1]} hold {len(row)} tokens "
            f"and at most {max_tokens} targets are wanted: not one sequence of {length} + 1; "
            "give this split more of `split`, or evaluate shorter lengths"
        )
    out_NT = np.empty((n, length + 1), dtype=np.int64)
    out_NT[:, :-1] = row[: n * length].reshape(n, length)
    out_NT[:, -1] = row[length : n * length + 1 : length]
    return out_NT


def eval_span(
    shards: ShardReader, documents: tuple[int, int], lengths: Sequence[int], max_tokens: int
) -> int:
    """Targets (<= max_tokens) that every length can cover exactly: a multiple of all of `lengths`.

    Where the text is shorter than their least common multiple, it is what the longest length
    covers; a shorter one then leaves out less than one sequence of its own at the end. 0 if not one
    sequence fits.
    """
    available = max(0, min(max_tokens, len(_row(shards, documents)) - 1))
    multiple = math.lcm(*lengths)
    if available >= multiple:
        return available // multiple * multiple
    return available // max(lengths) * max(lengths)


def _row(shards: ShardReader, documents: tuple[int, int]) -> np.ndarray:
    """The tokens of documents [start, end), which lie one after the other in .bin."""
    start, end = documents
    if not 0 <= start <= end <= len(shards):
        raise ValueError(f"documents {documents} of {len(shards)}")
    if start == end:
        return shards.tokens[:0]
    begin = int(shards.pointers[start]) // shards.dtype.itemsize
    stop = int(shards.pointers[end - 1]) // shards.dtype.itemsize + int(shards.sizes[end - 1])
    return shards.tokens[begin:stop]
