"""Test the sample index against published arrays and against a plain list of all tokens."""

from __future__ import annotations

import hashlib
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.errors import ShardError
from megatron.data.samples import index as sample_index
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.index import (
    IndexArguments,
    build_sample_index,
    cut_samples,
    num_epochs,
    sample_idx_dtype,
)
from megatron.data.samples.split import SPLITS, split_documents


def cuts_by_listing_every_token(sizes, doc_idx, seq_length):
    """Compute sample_idx plainly: list the place of each token, and take every L-th entry."""
    row = [(place, at) for place, document in enumerate(doc_idx) for at in range(sizes[document])]
    return [(0, 0), *row[seq_length::seq_length]]


@pytest.mark.parametrize("case", ["samples_a", "samples_b"])
def test_published_order(parity, published_shards, case):
    manifest = json.loads((parity / f"{case}.json").read_text())
    arrays = np.load(parity / f"{case}.npz")
    splits = split_documents(manifest["split"], len(published_shards))
    bounds = manifest["splits_index"]
    assert splits == list(zip(bounds[:-1], bounds[1:], strict=True))
    checked = 0
    for name, documents in zip(SPLITS, splits, strict=True):
        expected = manifest["datasets"][name]
        if expected is None:
            assert documents[0] == documents[1]
            continue
        length = manifest["seq_length" if name == "train" else "seq_length_val"]
        wanted = manifest["num_samples"][name]
        dataset = TokenDataset(published_shards, documents, wanted, length, manifest["seed"], name)
        for array in ("doc_idx", "sample_idx", "shuffle_idx"):
            ours, theirs = getattr(dataset.index, array), arrays[f"{name}/{array}"]
            assert ours.dtype == theirs.dtype == expected["dtypes"][array]
            np.testing.assert_array_equal(ours, theirs)
        assert dataset.index.num_built == expected["num_built_samples"]
        assert dataset.published_length == len(dataset) == expected["len"]
        everything = dataset.batch(range(len(dataset)))
        digest = hashlib.sha256(everything.astype("<i8").tobytes()).hexdigest()
        assert digest == expected["sha256_all_samples_int64"]
        first = arrays[f"{name}/samples"]
        np.testing.assert_array_equal(everything[: len(first)], first)
        checked += 1
    assert checked >= 2


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(lambda s: sum(s) > 0),
    seq_length=st.integers(1, 30),
    num_samples=st.integers(0, 50),
    seed=st.integers(0, 2**32 - 1),
)
def test_index_is_the_rule(sizes, seq_length, num_samples, seed):
    sizes = np.array(sizes, np.int32)
    index = build_sample_index(
        IndexArguments(sizes, (0, len(sizes)), num_samples, seq_length, seed)
    )
    epochs = len(index.doc_idx) // len(sizes)
    tokens = int(sizes.sum())
    # There are enough samples, from as few epochs as possible.
    assert index.num_built >= num_samples
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // seq_length < num_samples
    assert epochs == num_epochs(tokens, seq_length, num_samples)
    np.testing.assert_array_equal(
        np.bincount(index.doc_idx, minlength=len(sizes)), np.full(len(sizes), epochs)
    )
    cuts = cuts_by_listing_every_token(sizes, index.doc_idx, seq_length)
    # The end of the row may be one more cut, which no target token follows.
    assert index.sample_idx.tolist() == [list(cut) for cut in cuts[: index.num_built + 1]]
    assert index.num_built == (epochs * tokens - 1) // seq_length
    assert sorted(index.shuffle_idx) == list(range(index.num_built))


@pytest.mark.parametrize("mean, seq_length", [(3, 64), (3, 700), (40, 7), (200, 3), (0.2, 1)])
def test_index_across_chunks(monkeypatch, mean, seq_length):
    """Cases are sparse and dense cuts, many chunks, and long runs of empty documents."""
    monkeypatch.setattr(sample_index, "_CHUNK", 1)
    rng = np.random.RandomState(3)
    sizes = rng.poisson(mean, 2000).astype(np.int32)
    sizes[300:1100] = 0
    sizes[1500] = 5000
    doc_idx = rng.permutation(2000).astype(np.int32)
    doc_idx[:1000] = np.arange(200, 1200)
    doc_idx[1000:] = rng.randint(0, 2000, 1000)
    total = int(sizes[doc_idx].sum())
    cuts = cut_samples(sizes, doc_idx, seq_length, total)
    expected = cuts_by_listing_every_token(sizes, doc_idx, seq_length)
    assert cuts.tolist() == [list(cut) for cut in expected[: len(cuts)]]
    assert len(cuts) == (total - 1) // seq_length + 1


def test_first_documents_without_tokens():
    sizes = np.array([0, 0, 5, 0, 4], np.int32)
    cuts = cut_samples(sizes, np.arange(5, dtype=np.int32), 4, 9)
    assert cuts.tolist() == [[0, 0], [2, 4], [4, 3]]


def test_more_tokens_than_int32_holds():
    size = 2**31 - 1
    sizes = np.full(3, size, np.int32)
    seq_length = 2**20 + 7
    cuts = cut_samples(sizes, np.arange(3, dtype=np.int32), seq_length, 3 * size)
    tokens = np.arange(len(cuts), dtype=np.int64) * seq_length
    np.testing.assert_array_equal(cuts, np.stack([tokens // size, tokens % size], axis=1))
    assert cuts[-1, 0] == 2


def test_dtype_of_the_index(monkeypatch):
    assert sample_idx_dtype(2**30 - 3, 10) is np.int32
    assert sample_idx_dtype(2**30 - 1, 10) is np.int64
    assert sample_idx_dtype(10, 2**31 - 1) is np.int32
    assert sample_idx_dtype(10, 2**31) is np.int64
    sizes = np.arange(1, 60, dtype=np.int32)
    narrow = build_sample_index(IndexArguments(sizes, (0, 59), 20, 16, 0))
    monkeypatch.setattr(sample_index, "sample_idx_dtype", lambda *_: np.int64)
    wide = build_sample_index(IndexArguments(sizes, (0, 59), 20, 16, 0))
    assert (narrow.sample_idx.dtype, wide.sample_idx.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(narrow.sample_idx, wide.sample_idx)


@pytest.mark.parametrize("mean", [100, 2000])
def test_extra_memory(mean):
    sizes = np.random.RandomState(0).poisson(mean, 1_000_000).astype(np.int32)
    doc_idx = np.arange(len(sizes), dtype=np.int32)
    tracemalloc.start()
    cuts = cut_samples(sizes, doc_idx, 512, int(sizes.sum(dtype=np.int64)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - cuts.nbytes <= 16 * len(sizes)


@given(
    split=st.lists(st.floats(0, 1000), min_size=1, max_size=3).filter(lambda w: sum(w) > 1e-6),
    separator=st.sampled_from([",", "/", ", "]),
    size=st.integers(0, 100_000),
)
def test_splits_cover_all_documents(split, separator, size):
    splits = split_documents(separator.join(map(repr, split)), size)
    assert splits[0][0] == 0 and splits[-1][1] == size
    assert all(start <= end for start, end in splits)
    assert splits[0][1] == splits[1][0] and splits[1][1] == splits[2][0]


@pytest.mark.parametrize(
    "split, size, expected",
    [
        ("949,50,1", 205, [(0, 195), (195, 205), (205, 205)]),
        ("969, 30, 1", 607, [(0, 588), (588, 606), (606, 607)]),
        ("100", 5, [(0, 5), (5, 5), (5, 5)]),
        ("1/1", 5, [(0, 3), (3, 5), (5, 5)]),
        ("3/1,1", 5, [(0, 3), (3, 4), (4, 5)]),
        ("1,1,1", 2, [(0, 0), (0, 1), (1, 2)]),  # the published rounding, surplus taken from all
        ("0,1,1", 3, [(0, 0), (0, 1), (1, 3)]),  # there the published bound would be -1
    ],
)
def test_split_rounding(split, size, expected):
    assert split_documents(split, size) == expected


def test_a_split_without_tokens_is_refused():
    with pytest.raises(ShardError, match="2 documents of this split hold no tokens"):
        build_sample_index(IndexArguments(np.array([0, 0, 7], np.int32), (0, 2), 1, 4, 0))
