"""Write token shards of given documents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter


def add_document(writer: ShardWriter, tokens: np.ndarray) -> None:
    """Append one document of `tokens` [n]."""
    writer.add_documents(tokens, np.array([len(tokens)]))


def write_documents(prefix: str | Path, documents: Iterable, dtype=np.uint16) -> ShardReader:
    """Write a token shard of documents (sequences of tokens), and open it."""
    with ShardWriter(prefix, dtype) as writer:
        for document in documents:
            add_document(writer, np.asarray(document, dtype))
    return ShardReader(prefix)
