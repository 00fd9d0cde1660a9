"""Test token shards: the bytes of the published writer, round trips, and every kind of fault."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron.data.errors import ShardError
from megatron.data.shards.format import DTYPES, HEADER
from megatron.data.shards.interface import tokens_of
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter
from tests.helpers.shards import add_document, write_documents

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def test_rewriting_the_published_tokens_gives_the_published_bytes(
    published_shards, make_shards, parity, tmp_path
):
    copy = make_shards([published_shards.get(i) for i in range(205)], published_shards.dtype)
    assert len(published_shards) == len(copy) == 205 and copy.dtype == np.uint16
    for suffix in (".bin", ".idx"):
        published = (parity / f"corpus_text_document{suffix}").read_bytes()
        assert (tmp_path / f"made{suffix}").read_bytes() == published


@pytest.mark.parametrize("code", sorted(DTYPES))
@given(data=st.data())
def test_round_trip(code, tmp_path_factory, data):
    dtype = DTYPES[code]
    arrays = hnp.arrays(dtype, st.integers(0, 9))
    documents = data.draw(st.lists(arrays, max_size=6))
    prefix = tmp_path_factory.mktemp("trip") / "with.dots"
    shards = write_documents(prefix, documents, dtype)
    assert HEADER.unpack(prefix.with_name("with.dots.idx").read_bytes()[: HEADER.size])[2] == code
    assert shards.dtype == dtype and len(shards) == len(documents)
    assert shards.sizes.tolist() == [len(document) for document in documents]
    assert shards.doc_idx.tolist() == list(range(len(documents) + 1))
    assert shards.sizes.dtype == np.int32 and shards.pointers.dtype == np.int64
    for i, document in enumerate(documents):
        np.testing.assert_array_equal(shards.get(i), document)
    everything = np.concatenate([np.empty(0, dtype), *documents])
    np.testing.assert_array_equal(shards.tokens, everything)


def test_documents_are_read_by_number(make_shards):
    shards = make_shards(DOCUMENTS)
    assert [shards.get(i).tolist() for i in range(4)] == DOCUMENTS
    assert tokens_of(shards, (1, 4)).tolist() == [4, 5, 6, 7, 8]
    assert tokens_of(shards, (1, 1)).tolist() == []
    for wrong in (4, -1):
        with pytest.raises(ValueError, match="made: documents .* of 4"):
            shards.get(wrong)
    for wrong in [(0, 5), (2, 1), (-1, 2)]:
        with pytest.raises(ValueError, match="made: documents .* of 4"):
            tokens_of(shards, wrong)
    with pytest.raises(ValueError, match="read-only"):
        shards.tokens[0] = 9


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    for value, dtype in [(65536, np.uint16), (-1, np.uint16), (2**31, np.int32), (1.5, np.int32)]:
        with (
            pytest.raises(ValueError, match="token of document 1 does not fit"),
            ShardWriter(tmp_path / "x", dtype) as writer,
        ):
            add_document(writer, np.array([7], np.int64))
            add_document(writer, np.array([1, value]))
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ShardError, match="no dtype code for float16"):
        ShardWriter(tmp_path / "x", np.float16)


def damage(path, change):
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content))


def put(content, at, new):
    content[at : at + len(new)] = new
    return content


SIZES = HEADER.size
POINTERS = SIZES + 4 * 4
DOC_IDX = POINTERS + 4 * 8
FAULTS = [
    (".idx", lambda c: c[:-1], r"made\.idx: truncated: 4 documents need 122 bytes.*prepare_data"),
    (".idx", lambda c: c[:20], r"made\.idx: truncated: 20 bytes.*copy it again"),
    (".idx", lambda c: b"", r"made\.idx: truncated: 0 bytes"),
    (".idx", lambda c: c + b"\0", r"made\.idx: foreign or damaged"),
    (".idx", lambda c: put(c, 0, b"PK\3\4"), r"made\.idx: is not an index .*check the path"),
    (".idx", lambda c: put(c, 0, b"TNTIDX\0\0"), r"made\.idx: .*'lazy'.*--dataset-impl mmap"),
    (".idx", lambda c: put(c, 9, b"\2"), r"made\.idx: format version 2"),
    (".idx", lambda c: put(c, 17, b"\x63"), r"made\.idx: unknown dtype code 99; known: \[1, "),
    (".idx", lambda c: put(c, 17, b"\4"), r"made\.idx: damaged: .*addresses"),
    (".idx", lambda c: put(c, SIZES, b"\xff\xff\xff\xff"), r"made\.idx: damaged"),
    (".idx", lambda c: put(c, SIZES, b"\2"), r"made\.idx: damaged"),
    (".idx", lambda c: put(c, POINTERS + 8, b"\7"), r"made\.idx: damaged"),
    (".idx", lambda c: put(c, DOC_IDX, b"\x09"), r"made\.idx: damaged: doc_idx"),
    (".bin", lambda c: c[:-1], r"made\.bin: truncated: made\.idx describes 16 bytes .*has 15"),
    (".bin", lambda c: b"", r"made\.bin: truncated"),
    (".bin", lambda c: c + b"\0\0", r"made\.bin: not the file that the \.idx describes"),
]


@pytest.mark.parametrize("suffix, change, message", FAULTS)
def test_damaged_files(make_shards, tmp_path, suffix, change, message):
    make_shards(DOCUMENTS)
    damage(tmp_path / f"made{suffix}", change)
    with pytest.raises(ShardError, match=message):
        ShardReader(tmp_path / "made")


def test_a_mismatched_pair(make_shards, tmp_path):
    make_shards(DOCUMENTS)
    make_shards([[1, 2]], name="other")
    shutil.copy(tmp_path / "other.bin", tmp_path / "made.bin")
    with pytest.raises(ShardError, match=r"made\.bin: truncated: .*copy both files again"):
        ShardReader(tmp_path / "made")


@pytest.mark.parametrize(
    "asked, message",
    [
        ("mad", r"mad\.idx and .*mad\.bin: no such file; did you mean .*/made\?"),
        ("made.bin", r"no such file; give the path without its ending: .*/made$"),
        ("none", r"no such file; data_path is the common path of both files"),
    ],
)
def test_missing_files(make_shards, tmp_path, asked, message):
    make_shards(DOCUMENTS)
    with pytest.raises(ShardError, match=message):
        ShardReader(tmp_path / asked)


def test_one_file_of_the_pair_is_missing(make_shards, tmp_path):
    make_shards(DOCUMENTS)
    (tmp_path / "made.bin").unlink()
    with pytest.raises(ShardError, match=r"made\.bin: no such file; copy the other one too"):
        ShardReader(tmp_path / "made")
