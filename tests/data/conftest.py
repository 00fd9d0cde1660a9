"""Data tests: the published files, small shards made on the spot, GPT-2's tokenizer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.mmap import MMapIndexedDataset, MMapIndexedDatasetWriter


@pytest.fixture(scope="session")
def parity(fixtures) -> Path:
    """What the published code made (see the README beside it)."""
    return fixtures / "data"


@pytest.fixture(scope="session")
def published_shards(parity) -> MMapIndexedDataset:
    return MMapIndexedDataset(parity / "corpus_text_document")


@pytest.fixture(scope="session")
def gpt2_files(parity, tmp_path_factory) -> tuple[Path, Path]:
    """GPT-2's vocab.json and merges.txt; the first follows from the second."""
    folder = tmp_path_factory.mktemp("gpt2")
    merges = gzip.decompress((parity / "gpt2-merges.txt.gz").read_bytes()).decode()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) for byte in printable]
    symbols += [chr(256 + n) for n in range(256 - len(printable))]
    merged = ["".join(line.split()) for line in merges.split("\n")[1:] if line]
    vocabulary = {token: i for i, token in enumerate([*symbols, *merged, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture
def make_shards(tmp_path) -> Callable[..., MMapIndexedDataset]:
    """make_shards(documents, dtype) writes them and opens what was written."""

    def make(documents: Iterable, dtype=np.uint16, name: str = "made") -> MMapIndexedDataset:
        with MMapIndexedDatasetWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.add_document(np.asarray(document, dtype))
        return MMapIndexedDataset(tmp_path / name)

    return make
