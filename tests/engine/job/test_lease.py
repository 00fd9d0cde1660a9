"""One writer of a folder: leases of living, dead and foreign holders."""

import json
import os
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.engine.errors import CheckpointError
from megatron.engine.job import holder, lease


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT", 0.1)
    monkeypatch.setattr(lease, "LIFETIME", 60.0)


def write_lease(folder, age=0.0, number=1, **changes):
    """The lease of another process, whose last heartbeat was `age` seconds ago."""
    path = folder / f".lease-{number}"
    path.write_text(json.dumps(holder.describe_process() | {"id": "other"} | changes))
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))
    return path


def leases(folder):
    return sorted(path.name for path in folder.iterdir())


FOREIGN = {"host": "elsewhere", "machine": "elsewhere boot pid:[1]", "pid": os.getpid()}


def test_it_is_held_and_kept_alive_for_the_block_and_released_after_errors(tmp_path):
    folder = tmp_path / "new" / "run"
    with pytest.raises(ZeroDivisionError), lease.sole_writer(folder) as confirm:
        path = folder / ".lease-1"
        found, first = json.loads(path.read_text()), path.stat().st_mtime_ns
        assert found["pid"] == os.getpid() and found["host"] and found["since"]
        deadline = time.monotonic() + 30
        while path.stat().st_mtime_ns == first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime_ns > first
        confirm()
        _ = 1 / 0
    assert leases(folder) == []


def test_a_living_holder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with lease.sole_writer(tmp_path):
        with pytest.raises(CheckpointError) as error, lease.sole_writer(tmp_path):
            raise AssertionError
        assert leases(tmp_path) == [".lease-1"]
    text = str(error.value)
    assert f"{tmp_path} is in use by process {os.getpid()} on " in text
    assert "job 77, since 20" in text and "name another `save`, or stop that job" in text
    assert "looking whether it is alive" in capsys.readouterr().out


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_holder_on_this_machine_is_replaced_at_once(tmp_path, capsys, reaped):
    process = subprocess.Popen(["sleep", "600"])
    started = holder.start_time(process.pid)
    write_lease(tmp_path, pid=process.pid, started=started)
    process.kill()
    if reaped:
        process.wait()
    else:  # a zombie: its parent has not asked for its exit code
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with lease.sole_writer(tmp_path) as confirm:
        assert leases(tmp_path) == [".lease-2"]
        confirm()
    assert capsys.readouterr().out == ""
    process.wait()


def test_another_process_with_the_number_of_the_holder_is_not_the_holder(tmp_path):
    write_lease(tmp_path, pid=os.getpid(), started="1")
    with lease.sole_writer(tmp_path):
        assert leases(tmp_path) == [".lease-2"]


def test_a_silent_holder_elsewhere_is_replaced_after_its_lifetime(tmp_path):
    write_lease(tmp_path, age=61, **FOREIGN)
    with lease.sole_writer(tmp_path):
        assert leases(tmp_path) == [".lease-2"]


def test_a_holder_that_this_machine_cannot_look_at_counts_as_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(holder, "PROC", tmp_path / "none")  # as on macOS
    write_lease(tmp_path, age=61)
    with lease.sole_writer(tmp_path):
        pass


def test_a_process_of_another_user_and_a_torn_lease_count_as_elsewhere(monkeypatch):
    def forbidden(pid, signal):
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert holder.is_alive(json.dumps(holder.describe_process())) is None
    assert holder.is_alive("torn") is None


def test_the_second_job_waits_for_a_silent_holder_elsewhere(tmp_path, monkeypatch, capsys):
    waits = []

    def wait(seconds):
        assert leases(tmp_path)[-1] == ".lease-1"
        waits.append(seconds)
        if len(waits) == 3:
            monkeypatch.setattr(lease, "LIFETIME", 29.0)

    write_lease(tmp_path, age=30, **FOREIGN)
    monkeypatch.setattr(lease.time, "sleep", wait)
    with lease.sole_writer(tmp_path):
        assert len(waits) == 3 and leases(tmp_path) == [".lease-2"]
    assert "is held by process" in capsys.readouterr().out


def test_the_second_job_ends_when_the_heartbeat_of_a_holder_elsewhere_moves(tmp_path):
    path, over = write_lease(tmp_path, age=30, **FOREIGN), threading.Event()

    def beat():
        while not over.wait(1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(CheckpointError, match="in use by process .* on elsewhere"):
        lease.sole_writer(tmp_path).__enter__()
    over.set()
    thread.join()
    assert leases(tmp_path) == [".lease-1"]


@pytest.mark.parametrize("other", [[], [2]])
def test_a_lost_lease_is_noticed_and_the_new_one_left_alone(tmp_path, other):
    with lease.sole_writer(tmp_path) as confirm:
        (tmp_path / ".lease-1").unlink()
        for number in other:
            write_lease(tmp_path, number=number, **FOREIGN)
        with pytest.raises(CheckpointError) as error:
            confirm()
    assert ("on elsewhere" if other else "its lease was deleted") in str(error.value)
    assert "is no longer this job's" in str(error.value)
    assert leases(tmp_path) == [f".lease-{number}" for number in other]


def test_a_lease_of_the_same_name_is_another_lease(tmp_path):
    with lease.sole_writer(tmp_path) as confirm:
        (tmp_path / ".lease-1").unlink()
        write_lease(tmp_path, **FOREIGN)
        time.sleep(0.3)  # heartbeats
        with pytest.raises(CheckpointError, match="on elsewhere"):
            confirm()
    assert leases(tmp_path) == [".lease-1"]


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_of_many_that_start_at_once_one_writes(tmp_path, dead):
    for number in range(1, dead + 1):
        write_lease(tmp_path, number=number, started="1")
    holders, most, ready = [], [], threading.Barrier(8)

    def start(number):
        ready.wait()
        try:
            with lease.sole_writer(tmp_path) as confirm:
                holders.append(number)
                most.append(len(holders))
                time.sleep(1.2)
                confirm()
                holders.remove(number)
        except CheckpointError as error:
            assert "in use" in str(error)
            return "refused"
        return "wrote"

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(start, range(8)))
    assert max(most) == 1 and "wrote" in ends and "refused" in ends
    assert leases(tmp_path) == []


def test_a_full_disk_leaves_no_lease(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # every write fails
    try:
        with pytest.raises(OSError, match="too large"), lease.sole_writer(tmp_path):
            raise AssertionError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leases(tmp_path) == []
