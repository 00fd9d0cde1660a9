"""Prepare data as gpt-neox does, in a plain version that `data_prep.py` compares with.

    python benchmarks/data_prep_per_document.py SOURCE PREFIX VOCAB_FILE MERGE_FILE WORKERS

A pool of processes calls `tokenizers` once for each document and returns lists of Python ints. Each
document is appended to the output separately. If MERGE_FILE is "-", VOCAB_FILE is a tokenizer.json,
as for gpt-neox's `HFTokenizer`.
"""

from __future__ import annotations

import multiprocessing
import sys

import lm_dataformat
import numpy as np
import tokenizers

from megatron.data.shards.format import HEADER, MAGIC
from megatron.data.tokenizers.build import build_tokenizer


def _start(vocab_file: str, merge_file: str) -> None:
    global _tokenizer
    if merge_file == "-":
        _tokenizer = tokenizers.Tokenizer.from_file(vocab_file)
        return
    _tokenizer = build_tokenizer(
        "GPT2BPETokenizer", vocab_file, merge_file, "tokenizers"
    ).reference  # the library's object


def _encode(text: str) -> tuple[list[int], int]:
    ids = _tokenizer.encode(text).ids
    ids.append(_tokenizer.token_to_id("<|endoftext|>"))
    return ids, len(text)


def per_document(source: str, prefix: str, vocab_file: str, merge_file: str, workers: int) -> None:
    texts = (text for text in lm_dataformat.Reader(source).stream_data() if text)
    if workers > 1:
        pool = multiprocessing.Pool(workers, _start, (vocab_file, merge_file))
        encoded = pool.imap(_encode, texts, chunksize=25)
    else:
        _start(vocab_file, merge_file)
        encoded = map(_encode, texts)
    sizes: list[int] = []
    with open(f"{prefix}.bin", "wb") as out:
        for ids, _ in encoded:
            out.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
            sizes.append(len(ids))
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size * 2)
    with open(f"{prefix}.idx", "wb") as out:
        out.write(HEADER.pack(MAGIC, 1, 8, len(sizes), len(sizes) + 1))
        for values, dtype in ((sizes, "<i4"), (starts, "<i8"), (range(len(sizes) + 1), "<i8")):
            out.write(np.array(values, dtype=dtype).tobytes(order="C"))


if __name__ == "__main__":
    per_document(*sys.argv[1:5], int(sys.argv[5]))
