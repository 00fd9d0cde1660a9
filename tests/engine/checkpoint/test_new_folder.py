"""Processes that write one folder at once: exactly one succeeds, and its result is whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time

import pytest

from megatron.engine.checkpoint.publish import new_checkpoint, new_folder
from megatron.engine.errors import CheckpointError
from megatron.engine.job import lease

WRITERS, ROUNDS, FILES = 4, 6, 5
FORK = multiprocessing.get_context("fork")


def write(opens, target, number, ready, ends):
    """Write FILES files that all name this writer, slowly; report "" or the error."""
    lease.HEARTBEAT = 0.1
    ready.wait()
    try:
        with opens(target) as folder:
            for name in range(FILES):
                (folder / f"{name}.json").write_text(json.dumps(number))
                time.sleep(0.01)
        ends.put((number, ""))
    except (CheckpointError, OSError) as error:
        ends.put((number, str(error)))


def race(opens, target):
    """Return the numbers of the writers that succeeded, and the errors of the others."""
    ready, ends = FORK.Barrier(WRITERS), FORK.SimpleQueue()
    work = [(opens, target, number, ready, ends) for number in range(WRITERS)]
    processes = [FORK.Process(target=write, args=each) for each in work]
    for each in processes:
        each.start()
    found = [ends.get() for _ in processes]
    for each in processes:
        each.join()
    return [n for n, text in found if not text], [text for _, text in found if text]


def writers_of(folder):
    """Return the numbers in the files of `folder`."""
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [f"{name}.json" for name in range(FILES)]
    return {json.loads(path.read_text()) for path in paths}


def test_of_several_writers_of_a_folder_one_succeeds(tmp_path):
    for number in range(ROUNDS):
        target = tmp_path / f"out{number}"
        if number % 2:
            target.mkdir()  # an empty folder may be named
        won, errors = race(new_folder, target)
        assert writers_of(target) == set(won) and len(won) == 1
        said = (f"{target} exists and is not empty", f".{target.name}.unfinished is in use by")
        assert all(any(text in error for text in said) for error in errors), errors
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"out{number}" for number in range(ROUNDS)
    )


def new_step(target):
    return new_checkpoint(target, "global_step3")


def test_of_several_imports_of_a_checkpoint_one_succeeds(tmp_path):
    for number in range(ROUNDS):
        target = tmp_path / f"run{number}"
        won, errors = race(new_step, target)
        assert writers_of(target / "global_step3") == set(won) and len(won) == 1
        said = ("global_step3 exists already", f"save: {target} is in use by")
        assert all(any(text in error for text in said) for error in errors), errors
        assert sorted(path.name for path in target.iterdir()) == ["global_step3", "latest"]


def test_a_rename_does_not_replace_what_another_process_has_written(tmp_path):
    """The check at the start cannot see it; the rename itself refuses."""
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "out") as folder:
        (folder / "mine").touch()
        (tmp_path / "out").mkdir()
        (tmp_path / "out/theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_writer_that_lost_its_lease_publishes_nothing(tmp_path):
    """It was stopped for too long. Meanwhile another process has begun, in a folder of its own."""
    error = pytest.raises(CheckpointError, match="no longer this job's")
    with error, new_folder(tmp_path / "out") as folder:
        (folder / "mine").touch()
        (folder.parents[1] / ".lease-1").unlink()
        with new_folder(tmp_path / "out") as second:
            assert second != folder and not folder.exists()
            (second / "theirs").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


def test_what_killed_writers_leave_is_removed_by_the_next(tmp_path):
    target = tmp_path / "out"
    for _ in range(2):
        child = os.fork()
        if child == 0:
            with new_folder(target) as folder:
                (folder / "half").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    with new_folder(target) as folder:
        assert [path.name for path in folder.parents[1].glob("new-*")] == [folder.parent.name]
        (folder / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]
