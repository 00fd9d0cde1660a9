"""Data: tokenizers, token shards, the order of samples, the loader, corpora, evaluation text."""

from __future__ import annotations

import os

from .errors import CorpusError, DataError, DataExhausted, ShardError, TokenizerError
from .manifest import check_tokenizer
from .mmap import MMapIndexedDataset
from .sample_index import split_documents
from .tokenizer import Tokenizer

__all__ = [
    "CorpusError",
    "DataError",
    "DataExhausted",
    "ShardError",
    "TokenizerError",
    "open_splits",
]


def open_splits(
    data_path: str | os.PathLike, split: str, tokenizer: Tokenizer | None = None
) -> tuple[MMapIndexedDataset, list[tuple[int, int]]]:
    """Open the shards `data_path` and cut them by `split`.

    Returns (shards, [train, valid, test]), each split as (start, end) of documents.

    With `tokenizer`, shards whose manifest names another one are refused (ShardError).
    """
    shards = MMapIndexedDataset(data_path)
    if tokenizer is not None:
        check_tokenizer(data_path, tokenizer)
    return shards, split_documents(split, len(shards))
