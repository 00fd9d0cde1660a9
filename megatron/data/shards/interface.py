"""The interface for reading token shards, the same for one shard and for several joined shards."""

from pathlib import Path
from typing import Protocol

import numpy as np


class Tokens(Protocol):
    """The tokens of all documents, one document after the other. Slicing returns an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray: ...


class Shards(Protocol):
    """Read access to the tokens of n documents. The caller must not write to the arrays.

    Attributes:
        prefix: The path of the .bin and .idx files without the suffix. For several token shards, a
            text with the paths of all shards.
        folder: The folder that contains the files of the shard, or of the first of several shards.
        dtype: The little-endian dtype of the tokens.
        sizes: The number of tokens in each document, int32 [n].
        pointers: The offset in bytes in `tokens` at which each document starts, int64 [n].
        tokens: The tokens of all documents, one document after the other.
    """

    prefix: str
    folder: Path
    dtype: np.dtype
    sizes: np.ndarray
    pointers: np.ndarray

    @property
    def tokens(self) -> Tokens: ...

    def __len__(self) -> int:
        """Return the number of documents."""
        ...


def tokens_of(shards: Shards, documents: tuple[int, int], most: int | None = None) -> np.ndarray:
    """Return the tokens of several consecutive documents as one array.

    Args:
        documents: (start, end). The range includes document `start` and excludes document `end`.
        most: The largest number of tokens to return. None means all.

    Raises:
        ValueError: The shards do not contain all these documents.
    """
    # The array is a view, not a copy, if the documents lie in one shard.
    start, end = documents
    if not 0 <= start <= end <= len(shards):
        raise ValueError(f"{shards.prefix}: documents {documents} of {len(shards)}")
    if start == end:
        return shards.tokens[:0]
    begin = int(shards.pointers[start]) // shards.dtype.itemsize
    stop = int(shards.pointers[end - 1]) // shards.dtype.itemsize + int(shards.sizes[end - 1])
    return shards.tokens[begin : stop if most is None else min(stop, begin + most)]
