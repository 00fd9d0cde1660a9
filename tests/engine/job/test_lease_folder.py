"""Leases name their folder, are handed on, and are waited for within bounds, whatever they hold."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time

import pytest

from megatron.engine.errors import CheckpointError
from megatron.engine.job import lease
from megatron.engine.job.holder import describe_process
from tests.engine.job.test_lease import FOREIGN, leases, write_lease
from tests.helpers.paths import ROOT

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT", 0.1)


def test_a_copy_of_a_live_runs_folder_is_free(tmp_path, capsys):
    with lease.sole_writer(tmp_path / "run") as confirm:
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert leases(tmp_path / "copy") == [".lease-1"]
        with lease.sole_writer(tmp_path / "copy") as other:
            assert leases(tmp_path / "copy") == [".lease-2"]
            confirm()
            other()
        with pytest.raises(CheckpointError, match="in use by"):
            lease.sole_writer(tmp_path / "run").__enter__()


def test_another_path_to_a_live_runs_folder_is_no_copy(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with lease.sole_writer(tmp_path / "run"):
        with pytest.raises(CheckpointError, match="in use by"):
            lease.sole_writer(tmp_path / "link").__enter__()
        monkeypatch.setattr(lease, "LIFETIME", 1.0)
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(CheckpointError, match="in use by"):
            lease.sole_writer(tmp_path / "moved").__enter__()


@pytest.mark.parametrize("again", [False, True])
def test_of_a_deleted_folder_the_truth_is_said(tmp_path, again):
    with lease.sole_writer(tmp_path / "run") as confirm:
        (tmp_path / "run").rename(tmp_path / "gone")
        if again:
            (tmp_path / "run").mkdir()
        with pytest.raises(CheckpointError) as error:
            confirm()
    assert "the folder was deleted, moved, or replaced" in str(error.value)
    assert "sign of life" not in str(error.value)


def test_a_lease_of_an_earlier_version_is_read(tmp_path):
    earlier = describe_process()
    assert "folder" not in earlier
    (tmp_path / ".lease-1").write_text(json.dumps(earlier))
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on "):
        beaten(tmp_path)


def beaten(folder):
    """Try to take `folder` while the heartbeat of its lease moves."""
    beat = "import os, time\nwhile True: time.sleep(0.2); os.utime('.lease-1')"
    process = subprocess.Popen([sys.executable, "-c", beat], cwd=folder)
    try:
        lease.sole_writer(folder).__enter__()
    finally:
        process.kill()
        process.wait()


def test_a_lease_dated_ahead_is_waited_for_no_longer_than_another(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "LIFETIME", 1.0)
    write_lease(tmp_path, age=-1e6, **FOREIGN)
    begun = time.monotonic()
    with lease.sole_writer(tmp_path):
        assert leases(tmp_path) == [".lease-2"]
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize("number", [999999999, 10**30 - 1])
def test_a_lease_of_any_number_is_followed(tmp_path, number):
    write_lease(tmp_path, number=number, started="1")
    with lease.sole_writer(tmp_path) as confirm:
        assert leases(tmp_path) == [f".lease-{number + 1}"]
        confirm()


def test_a_number_as_long_as_a_name_may_be_is_an_error(tmp_path):
    write_lease(tmp_path, number=10**248 - 1, started="1")
    with pytest.raises(OSError, match="too long"):
        lease.sole_writer(tmp_path).__enter__()


@pytest.mark.parametrize("kind", ["fifo", "folder", "large"])
def test_what_is_no_file_of_ours_is_named(tmp_path, kind):
    path = tmp_path / ".lease-3"
    make = {"fifo": lambda: os.mkfifo(path), "folder": path.mkdir,
            "large": lambda: path.write_bytes(bytes(5000))}  # fmt: skip
    make[kind]()
    with pytest.raises(OSError, match=r"\.lease-3: .*; remove it if no job is writing the folder"):
        lease.sole_writer(tmp_path).__enter__()
    assert leases(tmp_path) == [".lease-3"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_an_error_at_once(tmp_path, kind):
    path = tmp_path / "run"
    path.touch() if kind == "file" else path.symlink_to(tmp_path / "nowhere")
    begun = time.monotonic()
    with pytest.raises(FileExistsError):
        lease.sole_writer(path).__enter__()
    assert time.monotonic() - begun < 60


def test_a_waiter_that_slept_sees_the_heartbeats_of_the_time_between(tmp_path, monkeypatch):
    """It was suspended for longer than LIFETIME, and the holder on another host is alive."""
    monkeypatch.setattr(lease, "LIFETIME", 0.3)
    write_lease(tmp_path, **FOREIGN)
    path = tmp_path / ".lease-1"

    def suspended(_seconds: float) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(lease, "LIFETIME", 0.3)
        time.sleep(0.5)
        os.utime(path)

    monkeypatch.setattr(time, "sleep", suspended)
    with pytest.raises(CheckpointError, match="in use by"):
        lease.sole_writer(tmp_path).__enter__()


TORN = [b"[" * 3000, b'{"pid": ' + b"1" * 31 + b"}", b'{"pid": ' + b"1" * 4000 + b"}", b"\xff\0",
        b"null", b'{"pid": true}', b'{"pid": 0}', b'{"pid": -1}', b'{"pid": 5, "host": [1]}',
]  # fmt: skip


@pytest.mark.parametrize("content", TORN)
def test_a_damaged_lease_counts_as_one_from_elsewhere(tmp_path, content, monkeypatch, capsys):
    monkeypatch.setattr(lease, "LIFETIME", 0.3)
    (tmp_path / ".lease-1").write_bytes(content)
    with lease.sole_writer(tmp_path):
        assert leases(tmp_path) == [".lease-2"]


def test_many_silent_leases_are_waited_for_within_a_bound(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lease, "LIFETIME", 1.0)
    monkeypatch.setattr(lease, "LONGEST_WAIT", 2.0)
    for number in range(1, 50):
        write_lease(tmp_path, age=-1e6, number=number, **FOREIGN)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match="in use by|no lease could be taken"):
        lease.sole_writer(tmp_path).__enter__()
    assert time.monotonic() - begun < 30


CHILD = """
import sys, time
from pathlib import Path
from megatron.engine.job import lease
lease.HEARTBEAT = 0.1
with lease.sole_writer(Path(sys.argv[1])) as confirm:
    time.sleep(1)
    confirm()
    print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
"""


def compete(folder, over, ends):
    """Try to take the lease again and again; report how often that succeeded."""
    lease.HEARTBEAT, taken = 0.1, 0
    while not over.is_set():
        try:
            with lease.sole_writer(folder) as confirm:
                confirm()
                taken += not over.is_set()
        except CheckpointError:
            pass
    ends.put(taken)


def test_a_lease_is_handed_to_a_child_and_nobody_comes_between(tmp_path):
    over, ends = FORK.Event(), FORK.SimpleQueue()
    jobs = [FORK.Process(target=compete, args=(tmp_path, over, ends)) for _ in range(2)]
    with lease.sole_writer(tmp_path) as confirm:
        for job in jobs:
            job.start()
        environ = os.environ | {"PYTHONPATH": str(ROOT)} | lease.handed(tmp_path)
        command = [sys.executable, "-c", CHILD, str(tmp_path)]
        child = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        while ".lease-2" not in leases(tmp_path) and child.poll() is None:
            time.sleep(0.01)
        over.set()
        text, _ = child.communicate()
        assert child.returncode == 0 and text == "['.lease-2']\n"
        with pytest.raises(CheckpointError, match="no longer this job's"):
            confirm()
    assert [ends.get() for _ in jobs] == [0, 0]
    for job in jobs:
        job.join()
    assert leases(tmp_path) == []
