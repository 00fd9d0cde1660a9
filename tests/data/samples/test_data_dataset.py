"""Test the data set: what an epoch contains, `extend_to`, and the cache on disk."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.errors import DataExhausted, ShardError
from megatron.data.samples import index_cache
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.index import IndexArguments

SIZES = st.lists(st.integers(0, 15), min_size=1, max_size=25).filter(lambda s: sum(s) > 1)


class CountedTokens:
    """`Shards` in memory whose tokens are 0, 1, 2, ..., so all tokens are distinct."""

    def __init__(self, sizes):
        self.prefix, self.dtype = "counted", np.dtype(np.int32)
        self.sizes = np.array(sizes, np.int32)
        self.pointers = (np.cumsum(self.sizes, dtype=np.int64) - self.sizes) * 4
        self.tokens = np.arange(self.sizes.sum(), dtype=np.int32)

    def __len__(self):
        return len(self.sizes)


def row_of_tokens(dataset):
    """Return all tokens in the order of doc_idx."""
    shards = dataset.shards
    starts = shards.pointers // 4
    parts = [shards.tokens[starts[d] : starts[d] + shards.sizes[d]] for d in dataset.index.doc_idx]
    return np.concatenate(parts)


@given(SIZES, st.integers(1, 20), st.integers(1, 40), st.integers(0, 999))
def test_every_token_of_the_epochs_is_used(sizes, seq_length, num_samples, seed):
    arguments = (CountedTokens(sizes), (0, len(sizes)), num_samples, seq_length, seed, "train")
    built = TokenDataset(*arguments).index.num_built
    # `extend_to` includes the last sample built, which the published length leaves out.
    dataset = TokenDataset(*arguments, extend_to=built)
    everything = dataset.batch(range(built))
    in_row_order = np.empty_like(everything)
    in_row_order[dataset.index.shuffle_idx] = everything
    row = row_of_tokens(dataset)
    # Inputs laid end to end are the row, each label is the next token, and less than a
    # sample is left over.
    np.testing.assert_array_equal(in_row_order[:, :-1].ravel(), row[: built * seq_length])
    np.testing.assert_array_equal(in_row_order[:, 1:].ravel(), row[1 : built * seq_length + 1])
    assert len(row) - 1 - built * seq_length < seq_length
    # The row is whole epochs: each token as often as there are epochs.
    epochs = len(dataset.index.doc_idx) // len(sizes)
    np.testing.assert_array_equal(np.bincount(row), np.full(sum(sizes), epochs))


@given(SIZES, st.integers(1, 20), st.integers(0, 40), st.integers(0, 99))
def test_length(sizes, seq_length, num_samples, seed):
    dataset = TokenDataset(
        CountedTokens(sizes), (0, len(sizes)), num_samples, seq_length, seed, "train"
    )
    built = dataset.index.num_built
    assert num_samples <= len(dataset) <= built or built == 0
    assert len(dataset) >= built - 1
    if len(dataset):
        last = len(dataset) - 1
        np.testing.assert_array_equal(dataset.batch([last])[0], dataset.batch([0, last])[1])
    for outside in (len(dataset), -1):
        with pytest.raises(DataExhausted, match="train: sample .* raise train_iters"):
            dataset.batch([outside])


@given(SIZES, st.integers(1, 20), st.integers(0, 30), st.integers(0, 99), st.data())
def test_extension_keeps_the_prefix_and_repeats_nothing(sizes, seq_length, recorded, seed, data):
    def build(extend_to=None):
        shards = CountedTokens(sizes)
        return TokenDataset(
            shards, (0, len(sizes)), recorded, seq_length, seed, "train", extend_to=extend_to
        )

    first = build()
    more = data.draw(st.integers(0, 60))
    still_more = more + data.draw(st.integers(0, 60))
    once, twice = build(len(first) + more), build(len(first) + still_more)
    assert len(once) == len(first) + more and len(twice) == len(first) + still_more
    np.testing.assert_array_equal(once.batch(range(len(first))), first.batch(range(len(first))))
    np.testing.assert_array_equal(twice.batch(range(len(once))), once.batch(range(len(once))))
    # One at a time and in any order gives the same rows.
    order = data.draw(st.permutations(range(len(twice))))[:20]
    rows = [twice.batch([i])[0] for i in order]
    if rows:
        np.testing.assert_array_equal(twice.batch(order), np.stack(rows))


def test_a_long_extension_keeps_no_file_of_its_small_indices_open(tmp_path):
    """A process may have as few as 1,024 files open, and each epoch has three."""
    shards, given = CountedTokens([7] * 11), ((0, 11), 5, 4, 3, "train", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    built, loaded = (TokenDataset(shards, *given, extend_to=2000) for _ in range(2))
    assert len(list(tmp_path.glob("[!.]*"))) > 100  # epochs
    assert len(os.listdir("/proc/self/fd")) < before + 10
    np.testing.assert_array_equal(built.batch(range(2000)), loaded.batch(range(2000)))


def test_an_epoch_of_the_extension_holds_each_sample_once():
    """All tokens are distinct, so the first tokens of the samples of one epoch are distinct."""
    sizes = [7] * 11
    dataset = TokenDataset(CountedTokens(sizes), (0, 11), 5, 4, 3, "train", extend_to=200)
    epoch = dataset.index.num_built
    assert epoch == 19 and len(dataset) == 200
    starts = dataset.batch(range(190))[:, 0].reshape(10, epoch)
    assert all(len(set(block)) == epoch for block in starts.tolist())
    assert len({tuple(block) for block in starts.tolist()}) == 10  # each epoch has another order
    # Block k is the published order of one epoch with seed + k.
    second = TokenDataset(CountedTokens(sizes), (0, 11), 1, 4, 3 + 2, "train")
    np.testing.assert_array_equal(
        dataset.batch(range(2 * epoch, 3 * epoch - 1)), second.batch(range(epoch - 1))
    )


def test_samples_cross_documents(make_shards):
    shards = make_shards([[1, 2], [], [3], [4, 5, 6, 7, 8, 9]])
    dataset = TokenDataset(shards, (0, 4), 0, 3, 0, "train")
    order = dataset.index.doc_idx.tolist()
    row = [token for document in order for token in shards.get(document)]
    for i, cut in enumerate(dataset.index.shuffle_idx[: len(dataset)].tolist()):
        [sample] = dataset.batch([i])
        assert sample.dtype == np.int64
        assert sample.tolist() == row[cut * 3 : cut * 3 + 4]


def test_cache(published_shards, tmp_path, monkeypatch):
    def build(num_samples=300, seed=1, documents=(0, 150), cache_dir=tmp_path / "cache"):
        return TokenDataset(
            published_shards, documents, num_samples, 64, seed, "train", cache_dir, 3000
        )

    fresh, stored = build(cache_dir=None), build()
    np.testing.assert_array_equal(stored.batch(range(3000)), fresh.batch(range(3000)))
    folders = sorted(p.name for p in (tmp_path / "cache").iterdir())
    assert folders[0] == ".lock" and folders[1].startswith("train_1ns_64sl_2s_")

    def no_building(*_):
        raise AssertionError("the index was built again")

    monkeypatch.setattr(index_cache, "build_sample_index", no_building)
    again = build()
    np.testing.assert_array_equal(again.batch(range(3000)), fresh.batch(range(3000)))
    for other in ({"num_samples": 301}, {"seed": 5}, {"documents": (1, 150)}):
        with pytest.raises(AssertionError, match="built again"):
            build(**other)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == folders


def test_cache_is_for_these_documents_only(make_shards, tmp_path):
    one, other = make_shards([[1] * 9] * 4, name="a"), make_shards([[1] * 12] * 3, name="b")
    for shards in (one, other):
        cached = TokenDataset(shards, (0, 3), 4, 5, 0, "train", tmp_path / "cache")
        plain = TokenDataset(shards, (0, 3), 4, 5, 0, "train")
        np.testing.assert_array_equal(cached.index.sample_idx, plain.index.sample_idx)


def test_cache_ignores_what_a_dead_builder_left(published_shards, tmp_path):
    arguments = (tmp_path, "train", IndexArguments(published_shards.sizes, (0, 50), 10, 32, 0))
    index_cache.cached_sample_index(*arguments)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    complete = sorted(path.name for path in folder.iterdir())
    half = folder.with_name(f".{folder.name}.12345678")
    folder.rename(half)
    (half / "sample_idx.npy").unlink()
    index_cache.cached_sample_index(*arguments)
    assert sorted(path.name for path in folder.iterdir()) == complete


def test_what_a_dataset_refuses(make_shards):
    shards = make_shards([[1, 2, 3]])
    with pytest.raises(ShardError, match="the valid split has no documents"):
        TokenDataset(shards, (1, 1), 5, 4, 0, "valid")
    floats = make_shards([np.ones(4)], np.float32, "floats")
    with pytest.raises(ShardError, match="holds float32 numbers, not tokens"):
        TokenDataset(floats, (0, 1), 5, 4, 0, "train")


def test_a_damaged_or_unwritable_cache_is_no_obstacle(make_shards, tmp_path, capsys):
    shards = make_shards([[1, 2, 3, 4, 5]] * 20)
    cache = tmp_path / "cache"
    arguments = (shards, (0, 20), 30, 4, 0, "train")
    expected = TokenDataset(*arguments).batch(np.arange(30))
    TokenDataset(*arguments, cache_dir=cache)
    [folder] = cache.glob("train_*")
    whole = (folder / "sample_idx.npy").read_bytes()
    (folder / "sample_idx.npy").write_bytes(whole[: len(whole) // 2])
    again = TokenDataset(*arguments, cache_dir=cache)
    np.testing.assert_array_equal(again.batch(np.arange(30)), expected)
    assert (folder / "sample_idx.npy").read_bytes() == whole
    (folder / "doc_idx.npy").unlink()
    folder.rename(cache / "away")
    folder.write_text("in the way")
    kept = TokenDataset(*arguments, cache_dir=cache)
    np.testing.assert_array_equal(kept.batch(np.arange(30)), expected)
    assert "the sample index cannot be kept" in capsys.readouterr().err
