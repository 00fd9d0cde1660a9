"""What token shards offer to their readers, whether it is one shard or several joined."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np


class Tokens(Protocol):
    """The tokens of all documents, one document after the other; read by slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray: ...


class Shards(Protocol):
    """Read access to the tokens of n documents. None of the arrays may be written to.

    Attributes:
        prefix: the files, for messages.
        folder: where the files are; of several shards, where the first is.
        dtype: of the tokens, little-endian.
        sizes: int32 [n], tokens in each document.
        pointers: int64 [n], the byte of `tokens` at which each document starts.
        tokens: the tokens of all documents.
    """

    @property
    def prefix(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def sizes(self) -> np.ndarray: ...

    @property
    def pointers(self) -> np.ndarray: ...

    @property
    def tokens(self) -> Tokens: ...

    def __len__(self) -> int:
        """The number of documents."""
        ...


def tokens_of(shards: Shards, documents: tuple[int, int]) -> np.ndarray:
    """The tokens of documents [start, end), in order; a view if they lie in one shard.

    Raises:
        ValueError: the shards do not have these documents.
    """
    start, end = documents
    if not 0 <= start <= end <= len(shards):
        raise ValueError(f"{shards.prefix}: documents {documents} of {len(shards)}")
    if start == end:
        return shards.tokens[:0]
    begin = int(shards.pointers[start]) // shards.dtype.itemsize
    stop = int(shards.pointers[end - 1]) // shards.dtype.itemsize + int(shards.sizes[end - 1])
    return shards.tokens[begin:stop]
