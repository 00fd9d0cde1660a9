"""Damaged token shards: an error, or the tokens that an independent reader finds."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import example, given

from megatron.data.errors import DataError, ShardError
from megatron.data.shards.format import DTYPES
from megatron.data.shards.joined import join, open_each
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.build import build_tokenizer
from tests.fuzz.damage import FOLDER, damaged, in_time, written
from tests.helpers.shards import write_documents

BYTES = build_tokenizer("ByteLevelTokenizer")
SIZES = ([], [3], [2, 0, 5, 1])
for number, sizes in enumerate(SIZES):
    documents = [np.arange(size) for size in sizes]
    for dtype in (np.uint16, np.int32):
        write_documents(FOLDER / f"good{number}{np.dtype(dtype).name}", documents, dtype)
PAIRS = {path.read_bytes(): path.with_suffix(".bin").read_bytes() for path in FOLDER.glob("*.idx")}
MANIFEST = (
    b'{"tokenizer": "ByteLevelTokenizer", "tokenizer_fingerprint": "%s", "source": {"partition": '
    b'{"part": 1, "of": 1, "begin": [0, 1], "end": [0, 1]}}}' % BYTES.fingerprint().encode()
)


def reference(idx: bytes, tokens: bytes) -> list[list[int | float]]:
    """The documents of a pair of files, read with `struct` alone."""
    _, _, code, count, _ = struct.unpack_from("<9sQBQQ", idx)
    letter = "?BbhiqfdH"[code]
    sizes = struct.unpack_from(f"<{count}i", idx, 34)
    starts = struct.unpack_from(f"<{count}q", idx, 34 + 4 * count)
    return [
        list(struct.unpack_from(f"<{size}{letter}", tokens, start))
        for size, start in zip(sizes, starts, strict=True)
    ]


@given(damaged([*PAIRS]), damaged([*PAIRS.values()], most=1))
def test_a_pair_of_files(idx: bytes, tokens: bytes) -> None:
    written("pair.idx", idx)
    for content in (tokens, PAIRS.get(idx, tokens)):
        written("pair.bin", content)
        try:
            with in_time():
                shards = ShardReader(FOLDER / "pair")
        except ShardError as error:
            assert "pair." in str(error)
            continue
        found = [shards.get(i).tolist() for i in range(len(shards))]
        np.testing.assert_equal(found, reference(idx, content))
        assert shards.dtype in [dtype.newbyteorder("<") for dtype in DTYPES.values()]


@given(damaged([MANIFEST]))
@example(b"[" * 3000 + b"]" * 3000)
@example(b'{"tokenizer_fingerprint": ' + b"1" * 5000 + b"}")
@example(MANIFEST.replace(b'"source": {', b'"source": 5, "x": {'))
@example(MANIFEST.replace(b'"part": 1', b'"part": null'))
@example(MANIFEST.replace(b'"of": 1', b'"of": 1e9'))
@example(MANIFEST.replace(b'_fingerprint": "', b'_fingerprint": 5, "x": "'))
def test_a_manifest(content: bytes) -> None:
    """It is read, named, or ignored as one of another program; the tokens are never wrong."""
    write_documents(FOLDER / "with-manifest", [range(5)])
    path = written("with-manifest.json", content)
    try:
        with in_time():
            shards = join(open_each(str(FOLDER / "with-*"), BYTES))
    except DataError as error:
        assert str(path)[: -len(".json")] in str(error) or "partition" in str(error)
        return
    assert shards.tokens[:].tolist() == list(range(5))
