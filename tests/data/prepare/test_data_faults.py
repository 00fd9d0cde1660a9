"""Test processes that are killed during their work, or that write the same files at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpora.python_stdlib import prepare_builtin
from megatron.data.errors import ShardError
from megatron.data.samples import index_cache
from megatron.data.samples.index import IndexArguments
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter
from megatron.data.tokenizers.build import build_tokenizer
from tests.helpers.shards import add_document, write_documents

# Writes data sets repeatedly, each with one more document, and rests while one is whole, so that a
# kill often meets a whole one; prints "ready" when it begins.
WRITER = """
import sys, time
import numpy as np
from megatron.data.shards.writer import ShardWriter
print("ready", flush=True)
for n in range(1, 10**6):
    with ShardWriter(sys.argv[1], np.int32) as writer:
        writer.manifest = str(n).encode()
        for i in range(n % 50 + 1):
            writer.add_documents(np.full(300, n, np.int32), np.array([300]))
    time.sleep(0.02)
"""
# Writes one data set that never ends.
SLOW_WRITER = """
import sys
import numpy as np
from megatron.data.shards.writer import ShardWriter
with ShardWriter(sys.argv[1], np.int32) as writer:
    print("ready", flush=True)
    while True:
        writer.add_documents(np.arange(100_000, dtype=np.int32), np.array([100_000]))
"""
# Waits for the file argv[2], so that all start at once, then prepares the corpus.
PREPARER = """
import pathlib, sys, time
from megatron.data.corpora.python_stdlib import prepare_builtin
from megatron.data.tokenizers.build import build_tokenizer
print("ready", flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.001)
print(prepare_builtin("builtin:python-stdlib", sys.argv[1], build_tokenizer("ByteLevelTokenizer")))
"""
INDEXER = """
import hashlib, pathlib, sys, time
import numpy as np
from megatron.data.samples.dataset import TokenDataset
from megatron.data.shards.reader import ShardReader
shards = ShardReader(sys.argv[3])
print("ready", flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.001)
data = TokenDataset(shards, (0, 205), 40_000, 64, 0, "train", sys.argv[1])
print(hashlib.sha256(data.batch(np.arange(2000))).hexdigest())
"""


@pytest.fixture
def start(repo_root):
    """Return start(code, *arguments), which starts a process and waits until it prints "ready"."""
    running = []

    def begin(code: str, *arguments: object) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=repo_root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_killed_writer_leaves_no_index(start, tmp_path):
    prefix, part = tmp_path / "x", tmp_path / "x.bin.part"
    process = start(SLOW_WRITER, prefix)
    while part.stat().st_size < 5_000_000:
        time.sleep(0.01)
    with pytest.raises(ShardError, match="another process is writing this data set"):
        ShardWriter(prefix, np.int32)
    kill(process)
    parts = ["x.bin.part", "x.idx.part"]
    assert sorted(path.name for path in tmp_path.iterdir()) == parts
    with pytest.raises(ShardError, match="no such file"):
        ShardReader(prefix)
    # The next writer takes over and leaves nothing of the dead one.
    write_documents(prefix, [range(3)], np.int32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert ShardReader(prefix).tokens.tolist() == [0, 1, 2]


def test_killed_at_any_moment_an_index_has_its_tokens(start, tmp_path):
    """After a kill at any moment, an existing .idx belongs to the .bin beside it."""
    prefix, index, whole = tmp_path / "x", tmp_path / "x.idx", 0
    rng = np.random.RandomState(0)
    for kills in range(100):
        if kills >= 8 and whole:
            break
        process = start(WRITER, prefix)
        while not index.exists():
            time.sleep(0.01)
        time.sleep(0.02 + 0.2 * rng.rand())
        kill(process)
        if not index.exists():
            continue
        shards = ShardReader(prefix)  # raises if the two do not match
        n = int(shards.tokens[0])
        assert len(shards) == n % 50 + 1 and (shards.tokens == n).all()
        assert Path(f"{prefix}.json").read_text() == str(n)
        whole += 1
    assert whole


def test_an_earlier_data_set_survives_until_the_new_one_is_whole(start, make_shards, tmp_path):
    made = make_shards([[1, 2, 3]])
    kill(start(SLOW_WRITER, made.prefix))
    assert ShardReader(made.prefix).tokens.tolist() == [1, 2, 3]


def test_ranks_that_prepare_the_corpus_at_once(start, tmp_path):
    go = tmp_path / "go"
    processes = [start(PREPARER, tmp_path / "data", go) for _ in range(3)]
    go.touch()
    results = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    # One made it and showed its progress; the others waited.
    assert sum("tokenising" in err for _, err in results) == 1
    alone = prepare_builtin(
        "builtin:python-stdlib", tmp_path, build_tokenizer("ByteLevelTokenizer")
    )
    for suffix in (".bin", ".idx", ".json"):
        together = Path(results[0][0].strip() + suffix)
        assert together.read_bytes() == Path(alone + suffix).read_bytes()


def test_ranks_that_build_an_index_at_once(start, published_shards, tmp_path):
    go, cache = tmp_path / "go", tmp_path / "cache"
    processes = [start(INDEXER, cache, go, published_shards.prefix) for _ in range(3)]
    go.touch()
    results = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    assert sorted(path.name[:5] for path in cache.iterdir()) == [".lock", "train"]


@pytest.fixture
def no_locks(monkeypatch):
    """Simulate a file system without locks."""

    def refuse(*_):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("fcntl.flock", refuse)


def test_without_locks_two_writers_do_not_meet(no_locks, tmp_path):
    with ShardWriter(tmp_path / "x", np.int32) as slow:
        add_document(slow, np.array([1, 2]))
        with ShardWriter(tmp_path / "x", np.int32) as quick:
            add_document(quick, np.array([1, 2]))
        assert ShardReader(tmp_path / "x").tokens.tolist() == [1, 2]
        add_document(slow, np.array([3]))
    assert ShardReader(tmp_path / "x").tokens.tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_without_locks_two_builders_of_an_index(no_locks, published_shards, tmp_path, monkeypatch):
    """The second process finds the folder of the first one and uses it."""
    wanted = IndexArguments(published_shards.sizes, (0, 100), 50, 64, 0)
    arguments = (tmp_path, "train", wanted)
    build = index_cache.build_sample_index

    def another_is_faster(*build_arguments):
        monkeypatch.setattr(index_cache, "build_sample_index", build)
        index_cache.cached_sample_index(*arguments)
        return build(*build_arguments)

    monkeypatch.setattr(index_cache, "build_sample_index", another_is_faster)
    index = index_cache.cached_sample_index(*arguments)
    np.testing.assert_array_equal(index.sample_idx, build(wanted).sample_idx)
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == [".lock", "train"]
