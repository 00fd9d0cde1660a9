"""The memory-mapped format (`mmap`) of Megatron and GPT-NeoX for tokenised documents.

A data set is a pair of files, PREFIX.bin and PREFIX.idx. All numbers are little-endian:

    .bin   the tokens of all documents, one after the other, nothing else
    .idx   magic    9 bytes  b"MMIDIDX" 00 00
           version  uint64   1
           code     uint8    dtype of the tokens, see DTYPES
           n        uint64   documents (GPT-NeoX: items)
           m        uint64   entries of doc_idx
           sizes    int32 [n]  tokens in each document
           pointers int64 [n]  byte at which it starts in .bin
           doc_idx  int64 [m]  0, 1, ..., n: first item of each document, then n

The files are byte for byte those of GPT-NeoX's `preprocess_data.py`. Codes 6 and 7 follow GPT-NeoX
(float32, float64); Megatron-LM reads 6 as float64. Tokens are never floats, so this does not matter
in practice.
"""

from __future__ import annotations

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
    """PREFIX + suffix. A prefix may contain dots, so this is not `Path.with_suffix`."""
    return Path(os.fspath(prefix) + suffix)
