"""Test that files are flushed before they count, and that a failed write names its file."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from megatron import files
from megatron.data.shards import writer
from megatron.engine.checkpoint import publish
from megatron.engine.job import lease
from megatron.engine.run_log.log import RunLog


@pytest.fixture
def flushed(monkeypatch):
    """Return the list of the names of the files and folders that are flushed, in order."""
    found: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: found.append(name_of(number)))
    return found


def name_of(number: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{number}"))


def test_a_failed_flush_names_the_file(tmp_path, monkeypatch):
    def fail(number):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error: .*table.csv"):
        files.write_text(tmp_path / "table.csv", "1,2")
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        files.flush(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_names_a_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"), files.naming(tmp_path):
        (tmp_path / "missing").read_text()
    with pytest.raises(OSError, match="^not a regular file$"), files.naming(tmp_path):
        raise OSError("not a regular file")


def test_a_lease_on_a_full_disk_names_its_file(tmp_path, monkeypatch):
    class Full(str):
        def encode(self, *args):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lease.json, "dumps", lambda content: Full("text"))
    named = pytest.raises(OSError, match="No space left on device: .*lease-1'")
    with named, lease.sole_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_folder_is_flushed_with_its_name(tmp_path, flushed):
    with lease.sole_writer(tmp_path / "runs" / "new"):
        assert flushed == ["runs"]


def test_metrics_are_flushed_before_the_checkpoint_is_named(tmp_path, flushed):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    publish.create_unfinished(tmp_path, "global_step1")
    publish.publish(tmp_path, "global_step1", lease.unleased)
    assert flushed.index("metrics.jsonl") < flushed.index(tmp_path.name)


def test_the_last_rows_are_flushed_when_a_log_is_closed(tmp_path, flushed):
    with RunLog(tmp_path, is_main=True) as log:
        log.metrics(1, {"loss": 1.0})
        assert flushed == []
    assert flushed == ["metrics.jsonl"]


def test_a_shard_is_there_after_a_power_loss(tmp_path, flushed):
    with writer.ShardWriter(tmp_path / "x", np.uint16) as shard:
        shard.add_documents(np.ones(3, np.uint16), np.array([3]))
    assert flushed == ["x.bin.part", "x.idx.part", tmp_path.name, tmp_path.name]
