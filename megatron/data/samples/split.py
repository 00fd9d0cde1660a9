"""Opening a run's shards, checked against its tokenizer and cut into train, valid and test."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.data.samples.index import split_documents
from megatron.data.shards.joined import JoinedShards, find_prefixes, open_shards
from megatron.data.shards.manifest import check_tokenizer
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer


def open_splits(
    data_path: str | os.PathLike | Sequence[str],
    split: str,
    tokenizer: Tokenizer | None = None,
) -> tuple[ShardReader | JoinedShards, list[tuple[int, int]]]:
    """Open the shards `data_path` (a prefix, a glob of them, or a list) and cut them by `split`.

    Returns (shards, [train, valid, test]), each split as (start, end) of documents.

    With `tokenizer`, shards whose manifest names another one are refused (ShardError).
    """
    shards = open_checked(data_path, tokenizer)
    return shards, split_documents(split, len(shards))


def open_checked(
    data_path: str | os.PathLike | Sequence[str], tokenizer: Tokenizer | None
) -> ShardReader | JoinedShards:
    """Open shards; ShardError if a manifest names another tokenizer."""
    prefixes = find_prefixes(data_path)
    if tokenizer is not None:
        for prefix in prefixes:
            check_tokenizer(prefix, tokenizer)
    return open_shards(prefixes)
