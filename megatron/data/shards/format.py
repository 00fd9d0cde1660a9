"""The memory-mapped format (`mmap`) of Megatron and GPT-NeoX for tokenised documents.

A token shard is a pair of files, PREFIX.bin and PREFIX.idx. All numbers are little-endian:

    .bin   the tokens of all documents, one document after the other, and nothing else
    .idx   magic    9 bytes  b"MMIDIDX" 00 00
           version  uint64   1
           code     uint8    dtype of the tokens, see `DTYPES`
           n        uint64   number of documents (GPT-NeoX calls them items)
           m        uint64   number of entries of doc_idx
           sizes    int32 [n]  number of tokens in each document
           pointers int64 [n]  offset in bytes in .bin at which each document starts
           doc_idx  int64 [m]  0, 1, ..., n (in GPT-NeoX: first item of each document, then n)

For the same documents, the files equal those of GPT-NeoX's `preprocess_data.py` byte for byte. As
in GPT-NeoX, dtype code 6 means float32 and 7 means float64. In Megatron-LM, 6 means float64. This
difference has no effect in practice, because tokens are never floats.
"""

import os
import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float32),
    7: np.dtype(np.float64),
    8: np.dtype(np.uint16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def shard_path(prefix: str | os.PathLike, suffix: str) -> Path:
    """Return `prefix` + `suffix` as a path."""
    # `Path.with_suffix` would cut a prefix that contains a dot.
    return Path(os.fspath(prefix) + suffix)


def starts_in_bin(sizes: np.ndarray, itemsize: int, begin: int) -> tuple[np.ndarray, int]:
    """Return where n consecutive documents lie in the .bin file of a token shard.

    Args:
        sizes: The number of tokens in each of the n documents.
        itemsize: The number of bytes of a token.
        begin: The offset in bytes at which the first of these documents starts.

    Returns:
        (starts, end), both in bytes. `starts` is the offset of each document, int64 [n]. `end` is
        the offset at which the last document ends.
    """
    ends = begin + np.cumsum(sizes, dtype=np.int64) * itemsize
    return ends - sizes * np.int64(itemsize), int(ends[-1]) if len(ends) else begin
