"""Test several token shards as one data set, joined or merged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.errors import ShardError
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.evaluation import eval_sequences, eval_span
from megatron.data.shards.interface import tokens_of
from megatron.data.shards.joined import JoinedShards, find_prefixes, join, open_each
from megatron.data.shards.merge import merge
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter
from tests.helpers.paths import ROOT


@pytest.fixture
def parts(make_shards, tmp_path):
    """Return three shards, of which the second has no documents, and their merged shard."""
    rng = np.random.default_rng(0)
    for name, count in (("p-1", 20), ("p-2", 0), ("p-3", 31)):
        make_shards([rng.integers(0, 999, n) for n in rng.integers(0, 30, count)], name=name)
    prefixes = [str(tmp_path / f"p-{i}") for i in (1, 2, 3)]
    merge(prefixes, tmp_path / "whole")
    return prefixes, ShardReader(tmp_path / "whole")


def test_joined_equals_merged(parts, tmp_path):
    prefixes, whole = parts
    joined = join(open_each(str(tmp_path / "p-*")))
    assert isinstance(joined, JoinedShards) and joined.prefix == " + ".join(prefixes)
    assert joined.folder == whole.folder and joined.dtype == whole.dtype
    for name in ("sizes", "pointers"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert len(joined) == len(whole) == 51 and len(joined.tokens) == len(whole.tokens)
    for i in (0, 19, 20, 50):
        np.testing.assert_array_equal(tokens_of(joined, (i, i + 1)), whole.get(i))
    rng = np.random.default_rng(1)
    for begin, end in rng.integers(0, len(whole.tokens) + 1, (200, 2)):
        np.testing.assert_array_equal(joined.tokens[begin:end], whole.tokens[begin:end])
    with pytest.raises(ValueError, match=r"documents \(51, 52\) of 51"):
        tokens_of(joined, (51, 52))
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
        shards = join(open_each(given))
        assert shards.tokens[0:].tolist() == whole.tokens.tolist() and len(shards) == len(whole)
    assert isinstance(join(open_each([prefixes[0]])), ShardReader)
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
        join(open_each([prefixes[0], wide.prefix]))
    with pytest.raises(ShardError, match=r"whole\.idx: exists already"):
        merge(prefixes, tmp_path / "whole")
    for i, fingerprint in ((1, "aa"), (3, "bb")):
        (tmp_path / f"p-{i}.json").write_text(f'{{"tokenizer_fingerprint": "{fingerprint}"}}')
    with pytest.raises(ShardError, match="p-3: was made with another tokenizer than"):
        JoinedShards(open_each(prefixes))


def test_the_first_tokens_of_many_are_read_without_the_others(parts, tmp_path, monkeypatch):
    prefixes, whole = parts
    joined = join(open_each(prefixes))
    tokens, read = type(joined.tokens), []
    original = tokens.__getitem__
    monkeypatch.setattr(
        tokens, "__getitem__", lambda self, span: read.append(span) or original(self, span)
    )
    np.testing.assert_array_equal(tokens_of(joined, (2, 51), 7), tokens_of(whole, (2, 51))[:7])
    assert eval_span(joined, (2, 51), (2, 3), 20) == 18
    eval_sequences(joined, (2, 51), 3, 18)
    assert [span.stop - span.start for span in read] == [7, 21, 19]


def test_more_shards_than_a_process_may_open_by_default(parts):
    """Each shard keeps two files open. The limit is raised for them, up to the hard limit."""
    code = (
        "import resource, sys; from megatron.data.shards.joined import open_each;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard));"
        "print(len(open_each([*sys.argv[1:]])), hard)"
    )
    prefixes, _ = parts
    links = [Path(f"{prefixes[0]}-{i}") for i in range(100)]
    for link in links:
        for suffix in (".bin", ".idx"):
            Path(f"{link}{suffix}").symlink_to(f"{prefixes[0]}{suffix}")
    command = [sys.executable, "-c", code, *map(str, links)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    count, hard = found.stdout.split()
    assert count == "100" and int(hard) > 300
