"""Cut the text of a split into evaluation sequences of a given length.

Let x_0, x_1, ... be the tokens of the split's documents, in the order of the shards. Sequence i
of length L is x[i L : i L + L + 1]. Its first L tokens are the inputs, and its last L tokens are
the targets. In n sequences, each of the tokens x_1 ... x_{n L} is a target exactly once. If two
lengths have the same product n L, the evaluations of the two lengths therefore have the same
targets. Only the contexts of the targets differ.
"""

import math
from collections.abc import Sequence

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.shards.interface import Shards, tokens_of


def eval_sequences(
    shards: Shards, documents: tuple[int, int], length: int, max_tokens: int
) -> np.ndarray:
    """Cut documents into n evaluation sequences, int64 [n, length + 1].

    The last token of a sequence is also the first token of the next sequence.

    Args:
        documents: (start, end). The range includes document `start` and excludes document `end`.
        length: The number of targets in a sequence.
        max_tokens: The largest number of targets in all sequences together.

    Raises:
        ShardError: The documents are too short for one sequence.
    """
    # The number n is as large as the documents and `max_tokens` allow. To compare several lengths
    # on the same targets, pass the return value of `eval_span`.
    row = tokens_of(shards, documents, max_tokens + 1)  # a copy, if it spans several shards
    n = (len(row) - 1) // length
    if n < 1:
        raise ShardError(
            f"{shards.prefix}: documents {documents[0]} to {documents[1]}, with at most "
            f"{max_tokens} targets, give {len(row)} tokens: not one sequence of {length} + 1; "
            "give this split more of `split`, or evaluate shorter lengths"
        )
    out_NT = np.empty((n, length + 1), dtype=np.int64)
    out_NT[:, :-1] = row[: n * length].reshape(n, length)
    out_NT[:, -1] = row[length : n * length + 1 : length]
    return out_NT


def eval_span(
    shards: Shards, documents: tuple[int, int], lengths: Sequence[int], max_tokens: int
) -> int:
    """Return how many targets to evaluate, so that all sequence lengths get the same targets.

    The result is the largest common multiple of `lengths` that is at most `max_tokens` and for
    which the documents have enough tokens.

    Args:
        documents: (start, end). The range includes document `start` and excludes document `end`.
        lengths: The sequence lengths, each the number of targets in a sequence.
        max_tokens: The largest number of targets.
    """
    # If every common multiple is too large, the result is the largest multiple of max(lengths)
    # within the limits. This multiple may be 0.
    available = max(0, len(tokens_of(shards, documents, max_tokens + 1)) - 1)
    multiple = math.lcm(*lengths)
    if available >= multiple:
        return available // multiple * multiple
    return available // max(lengths) * max(lengths)
