"""Evaluation text of a given length: non-overlapping sequences of the documents in file order.

The documents of a split, one after the other, are tokens x_0, x_1, .... Sequence i of length L is
x[i L : i L + L + 1]. Its inputs are x[i L : i L + L], and its targets are the same, one token
later. Each of the tokens x_1 ... x_{n L} is therefore a target exactly once, whatever L is, so
lengths are compared on the same text and differ only in context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.shards.interface import Shards, tokens_of


def eval_sequences(
    shards: Shards, documents: tuple[int, int], length: int, max_tokens: int
) -> np.ndarray:
    """int64 [n, length + 1]: sequences of documents [start, end) with n * length <= max_tokens.

    Several lengths have the same targets if `max_tokens` comes from `eval_span`.

    Raises:
        ShardError: the documents do not fill one sequence.
    """
    row = tokens_of(shards, documents)
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
    shards: Shards, documents: tuple[int, int], lengths: Sequence[int], max_tokens: int
) -> int:
    """Targets (<= max_tokens) that every length can cover exactly: a multiple of all of `lengths`.

    If the text is shorter than the least common multiple, the result is what the longest length
    covers. A shorter length then leaves out less than one of its sequences at the end. The result
    is 0 if the text is shorter than one sequence.
    """
    available = max(0, min(max_tokens, len(tokens_of(shards, documents)) - 1))
    multiple = math.lcm(*lengths)
    if available >= multiple:
        return available // multiple * multiple
    return available // max(lengths) * max(lengths)
