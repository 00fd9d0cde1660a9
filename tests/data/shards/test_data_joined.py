"""Several shards as one data set: side by side, and merged."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from megatron.data.errors import ShardError
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.evaluation import eval_sequences
from megatron.data.samples.split import open_splits
from megatron.data.shards.joined import JoinedShards, find_prefixes, merge, open_shards
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter


@pytest.fixture
def parts(make_shards, tmp_path):
    """Three shards, the second without documents, and the merged one."""
    rng = np.random.default_rng(0)
    for name, count in (("p-1", 20), ("p-2", 0), ("p-3", 31)):
        make_shards([rng.integers(0, 999, n) for n in rng.integers(0, 30, count)], name=name)
    prefixes = [str(tmp_path / f"p-{i}") for i in (1, 2, 3)]
    merge(prefixes, tmp_path / "whole")
    return prefixes, ShardReader(tmp_path / "whole")


def test_joined_equals_merged(parts, tmp_path):
    prefixes, whole = parts
    joined = open_shards(str(tmp_path / "p-*"))
    assert isinstance(joined, JoinedShards) and joined.prefixes == prefixes
    for name in ("sizes", "pointers", "doc_idx"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert len(joined) == len(whole) == 51 and len(joined.tokens) == len(whole.tokens)
    for i in (0, 19, 20, 50):
        np.testing.assert_array_equal(joined.get(i), whole.get(i))
    rng = np.random.default_rng(1)
    for begin, end in rng.integers(0, len(whole.tokens) + 1, (200, 2)):
        np.testing.assert_array_equal(joined.tokens[begin:end], whole.tokens[begin:end])
    with pytest.raises(IndexError, match="document 51 of 51"):
        joined.get(51)
    assert len(pickle.loads(pickle.dumps(joined))) == 51
    samples = [
        TokenDataset(s, (3, 40), 80, 7, 1, "x").batch(np.arange(80)) for s in (joined, whole)
    ]
    np.testing.assert_array_equal(*samples)
    np.testing.assert_array_equal(
        eval_sequences(joined, (5, 45), 11, 300), eval_sequences(whole, (5, 45), 11, 300)
    )


def test_a_disk_that_is_full_while_merging(parts, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "add_documents", full)
    with pytest.raises(ShardError, match=r"/full: .* No space left on device; nothing is written"):
        merge(parts[0], tmp_path / "full")
    assert not list(tmp_path.glob("full*"))


def test_what_a_data_path_can_be(parts, tmp_path):
    prefixes, whole = parts
    for given in (
        prefixes,
        tuple(prefixes),
        str(tmp_path / "p-?"),
        [str(tmp_path / "p-[12]"), prefixes[2]],
    ):
        shards, splits = open_splits(given, "50,30,20")
        assert shards.tokens[0:].tolist() == whole.tokens.tolist()
        assert splits == open_splits(whole.prefix, "50,30,20")[1]
    assert isinstance(open_shards([prefixes[0]]), ShardReader)
    for given, message in (
        (str(tmp_path / "q*"), "no shards"),
        ([], "an empty list names no shards"),
        ([prefixes[0], prefixes[0]], "named more than once"),
    ):
        with pytest.raises(ShardError, match=message):
            find_prefixes(given)


def test_what_does_not_belong_together(parts, make_shards, tmp_path):
    prefixes, _ = parts
    wide = make_shards([[1, 2]], np.int32, "wide")
    with pytest.raises(ShardError, match="wide: holds int32, .* uint16"):
        JoinedShards([prefixes[0], wide.prefix])
    with pytest.raises(ShardError, match=r"whole\.idx: exists already"):
        merge(prefixes, tmp_path / "whole")
    for i, fingerprint in ((1, "aa"), (3, "bb")):
        (tmp_path / f"p-{i}.json").write_text(f'{{"tokenizer_fingerprint": "{fingerprint}"}}')
    with pytest.raises(ShardError, match="p-3: was made with another tokenizer than"):
        JoinedShards(prefixes)
