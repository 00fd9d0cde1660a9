"""Test the built-in corpus: its content, and that it is made once, or again if it is damaged."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import permutations

import numpy as np
import pytest

from megatron.data.corpora import python_stdlib as corpora
from megatron.data.corpora.python_stdlib import (
    prepare_builtin,
    resolve_data_path,
    stdlib_files,
    stdlib_root,
)
from megatron.data.errors import CorpusError
from megatron.data.samples.split import split_documents
from megatron.data.shards.joined import join, open_each
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.build import build_tokenizer

BYTES = build_tokenizer("ByteLevelTokenizer")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Replace Python's standard library by a small one."""
    root = tmp_path / "lib"
    for name in ("a.py", "json/b.py", "json/tests/t.py", "encodings/x.py", "site-packages/p.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    (root / "_sysconfigdata_x.py").write_text("machine = 1\n")
    (root / "notes.txt").write_text("no Python\n")
    monkeypatch.setattr(corpora, "stdlib_root", lambda: root)
    return root


def test_the_whole_library(tmp_path, capsys):
    prefix = prepare_builtin("builtin:python-stdlib", tmp_path, BYTES)
    assert "tokenising python-stdlib |██████████|" in capsys.readouterr().err
    manifest = read_manifest(prefix)
    shards = join(open_each(prefix, BYTES))
    splits = split_documents("90,9,1", len(shards))
    assert manifest["text_bytes"] > 5_000_000 and len(shards) == manifest["documents"] > 400
    assert manifest["text_bytes"] + len(shards) == len(shards.tokens) == manifest["tokens"]
    assert shards.dtype == np.uint16 and (shards.tokens == 256).sum() == len(shards)
    files = [path for path in stdlib_files() if (stdlib_root() / path).stat().st_size]
    for i in (0, 7, len(shards) - 1):
        text = (stdlib_root() / files[i]).read_bytes().decode()
        assert BYTES.decode(shards.get(i)) == text + "<|endoftext|>"
    # The order is mixed: each split has files of many packages.
    for start, end in splits[:2]:
        assert len({path.parts[0] for path in files[start:end]}) > 20


def test_no_file_repeats_half_of_another():
    """Compare the sets of five-word sequences of all pairs of files."""
    files = [(stdlib_root() / path).read_text("utf-8", "ignore").split() for path in stdlib_files()]
    runs = [set(zip(*(words[i:] for i in range(5)), strict=False)) for words in files]
    users = defaultdict(list)
    for number, words in enumerate(runs):
        for run in words:
            users[run].append(number)
    shared = Counter(pair for found in users.values() for pair in permutations(found, 2))
    repeated = {
        f"{stdlib_files()[one]} in {stdlib_files()[other]}"
        for (one, other), count in shared.items()
        if count > len(runs[one]) / 2 and len(runs[one]) > 50  # stubs of a few lines do not count
    }
    assert not repeated


def test_selection_and_order(library, tmp_path, capsys):
    names = [path.as_posix() for path in stdlib_files()]
    assert sorted(names) == ["a.py", "json/b.py", "latin.py"]
    assert names == ["latin.py", "json/b.py", "a.py"]  # by hash, so the same on every machine
    prefix = prepare_builtin("builtin:python-stdlib", tmp_path / "data", BYTES)
    assert "/latin.py:2: byte 0xe9 is not valid UTF-8" in capsys.readouterr().err
    source = read_manifest(prefix)["source"]
    assert (source["corpus"], source["skipped"], source["files"][0]["files"]) == (
        "python-stdlib", 1, 3,
    )  # fmt: skip
    shards = ShardReader(prefix)
    assert [BYTES.decode(shards.get(i)[:-1]) for i in range(2)] == ["# json/b.py\n", "# a.py\n"]


def test_made_once_and_again_if_damaged(library, tmp_path, monkeypatch):
    prefix = prepare_builtin("builtin:python-stdlib", tmp_path, BYTES)
    content = ShardReader(prefix).tokens.tobytes()
    (library / "new.py").write_text("# the library changes, the prepared data does not\n")
    assert prepare_builtin("builtin:python-stdlib", tmp_path, BYTES) == prefix
    assert ShardReader(prefix).tokens.tobytes() == content
    (library / "new.py").unlink()
    for suffix in (".idx", ".bin", ".json"):
        path = tmp_path / "python-stdlib" / f"{prefix.rsplit('/', 1)[1]}{suffix}"
        path.write_bytes(path.read_bytes()[:-3])
        assert prepare_builtin("builtin:python-stdlib", tmp_path, BYTES) == prefix
        assert ShardReader(prefix).tokens.tobytes() == content


def test_tokenizers_do_not_share_a_data_set(library, tmp_path):
    other = build_tokenizer("CharLevelTokenizer")
    first = prepare_builtin("builtin:python-stdlib", tmp_path, BYTES)
    assert prepare_builtin("builtin:python-stdlib", tmp_path, other) != first
    join(open_each(first, BYTES))


def test_data_paths(library, tmp_path):
    prefix = resolve_data_path("builtin:python-stdlib", tmp_path, BYTES)
    assert prefix == prepare_builtin("builtin:python-stdlib", tmp_path, BYTES)
    assert resolve_data_path("some/prefix", tmp_path, BYTES) == "some/prefix"
    with pytest.raises(CorpusError, match="unknown corpus builtin:python-stdlb; did you mean buil"):
        resolve_data_path("builtin:python-stdlb", tmp_path, BYTES)
    with pytest.raises(CorpusError, match="unknown corpus builtin:wiki; known: builtin:python-std"):
        resolve_data_path("builtin:wiki", tmp_path, BYTES)


def test_an_interpreter_without_sources(library, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(corpora, "stdlib_root", lambda: tmp_path / "empty")
    with pytest.raises(CorpusError, match="holds no .py files .*--input"):
        prepare_builtin("builtin:python-stdlib", tmp_path / "data", BYTES)
