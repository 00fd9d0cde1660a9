"""Define fixtures of the data tests: published files, small token shards, a small corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.shards.reader import ShardReader
from tests.helpers import archives, commands
from tests.helpers.shards import write_documents


@pytest.fixture(scope="session")
def parity(fixtures) -> Path:
    """Return the folder of files that the published code wrote; its README describes them."""
    return fixtures / "data"


@pytest.fixture(scope="session")
def published_shards(parity) -> ShardReader:
    return ShardReader(parity / "corpus_text_document")


@pytest.fixture
def make_shards(tmp_path) -> Callable[..., ShardReader]:
    """Return make_shards(documents, dtype, name), which writes and opens a token shard."""

    def make(documents: Iterable, dtype=np.uint16, name: str = "made") -> ShardReader:
        return write_documents(tmp_path / name, documents, dtype)

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Return a folder with 2.4 MB of text in two files, one of them compressed."""
    folder = tmp_path_factory.mktemp("corpus")
    archives.lmd_archive(folder, archives.texts(600, 1))[0].rename(folder / "a.jsonl.zst")
    archives.write_jsonl(folder / "b.jsonl", archives.texts(600, 2))
    return folder


@pytest.fixture(scope="session")
def unbroken(corpus, gpt2_files, tmp_path_factory) -> tuple[list, dict[str, bytes]]:
    """Return (arguments for input and tokenizer, the files that an uninterrupted run wrote)."""
    folder = tmp_path_factory.mktemp("unbroken")
    arguments = ["--input", corpus, "-t", "GPT2BPETokenizer"]
    arguments += ["-v", gpt2_files[0], "-m", gpt2_files[1]]
    run = [*arguments, "--backend", "tokenizers", "--name", "x", "-d", folder, "--workers", 1]
    commands.call(*run, script="prepare_data.py")
    return arguments, commands.content(folder / "x_text_document")
