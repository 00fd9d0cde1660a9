"""Data tests: the published files, small shards made on the spot."""

from __future__ import annotations

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


@pytest.fixture
def make_shards(tmp_path) -> Callable[..., MMapIndexedDataset]:
    """make_shards(documents, dtype) writes them and opens what was written."""

    def make(documents: Iterable, dtype=np.uint16, name: str = "made") -> MMapIndexedDataset:
        with MMapIndexedDatasetWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.add_document(np.asarray(document, dtype))
        return MMapIndexedDataset(tmp_path / name)

    return make
