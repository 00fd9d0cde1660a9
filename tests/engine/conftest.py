"""A folder with token shards, shared by the tests of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs import write_shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def prefix(folder) -> str:
    return write_shards(folder)
