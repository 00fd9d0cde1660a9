"""Two sweeps of one grid at once: each cell is trained once, and no finished cell is a failure."""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path

import pytest

from megatron.engine.job import lease
from tests.helpers.jobs import rows
from tests.tools.experiments.test_sweep import index, write_grid
from tools import sweep
from tools.experiments import runner
from tools.experiments.state import Record

FORK = multiprocessing.get_context("fork")
TASK = {
    "tokenizer_type": None, "task_options": {"max_length": 4}, "train_iters": 3,
    "eval_iters": 0, "eval_examples": 8, "train_micro_batch_size_per_gpu": 2, "log_interval": 1,
}  # fmt: skip


@pytest.fixture
def grid(tmp_path, monkeypatch, start_forked) -> Path:
    monkeypatch.setattr(runner, "start", start_forked)
    changes = {"overrides": TASK, "axes": {"embedding": ["kerple_log"]}, "seeds": [1, 2, 3]}
    changes |= {"lengths": [4], "endpoints": {}}
    return write_grid(tmp_path, "builtin:copy", **changes)


def one_sweep(grid: Path, out: Path, ends: multiprocessing.SimpleQueue) -> None:
    lease.HEARTBEAT = 0.2
    server = (
        forkserver._forkserver
    )  # an earlier test may have started the parent's, no child of ours
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    with out.open("w") as sys.stdout:
        ends.put(sweep.main([str(grid)]))


def test_two_sweeps_share_a_grid(grid, tmp_path):
    ends, outs = FORK.SimpleQueue(), [tmp_path / name for name in ("a.txt", "b.txt")]
    jobs = [FORK.Process(target=one_sweep, args=(grid, out, ends)) for out in outs]
    for job in jobs:
        job.start()
    codes = [ends.get() for _ in jobs]
    for job in jobs:
        job.join()
    texts = [out.read_text() for out in outs]
    assert set(index(tmp_path).values()) == {"finished"}, texts
    assert not any("FAILED" in text or "Traceback" in text for text in texts), texts
    assert sum(text.count(": finished after") for text in texts) == 3, texts
    for seed in (1, 2, 3):
        folder = tmp_path / "runs" / f"kerple_log-{seed}"
        assert sorted(rows(folder)) == [1, 2, 3]
        assert (folder / "log.txt").read_text().count("starting fresh") == 1
        assert not list(folder.glob(".lease-*"))
    left = sum("left to other jobs" in text for text in texts)
    assert sorted(codes) == [0] * (2 - left) + [1] * left


def test_a_cell_that_another_sweep_took_meanwhile_is_left_to_it(
    grid, monkeypatch, start_forked, capsys
):
    """The other sweep holds the folder before this one can record how its process ended."""
    cell = grid.parent / "runs" / "kerple_log-1"
    monkeypatch.setattr(lease, "HEARTBEAT", 0.1)
    other = ExitStack()

    class Watched(start_forked):
        def poll(self):
            if super().poll() is not None:
                other.enter_context(lease.sole_writer(cell))
                (cell / "cell.json").write_text("of the other sweep")
            return super().poll()

    monkeypatch.setattr(runner, "start", Watched)
    with other:
        assert sweep.main([str(grid), "--only", "*-1"]) == 1
    out = capsys.readouterr().out
    assert "kerple_log-1: left to another job: save: " in out and "FAILED" not in out
    assert (cell / "cell.json").read_text() == "of the other sweep"


def test_a_cell_that_another_sweep_has_finished_meanwhile_is_not_run_again(
    grid, monkeypatch, capsys
):
    assert sweep.main([str(grid), "--only", "*-1"]) == 0
    cell = grid.parent / "runs" / "kerple_log-1"
    finished, log = (cell / "cell.json").read_text(), (cell / "log.txt").read_bytes()
    (cell / "cell.json").write_text(finished.replace('"finished"', '"cut off"'))
    of = Record.of

    def of_a_cell_that_another_sweep_finishes_now(each):
        (cell / "cell.json").write_text(finished)
        return of(each)

    monkeypatch.setattr(Record, "of", of_a_cell_that_another_sweep_finishes_now)
    assert sweep.main([str(grid), "--only", "*-1"]) == 0
    assert "kerple_log-1: another job has finished it" in capsys.readouterr().out
    assert (cell / "log.txt").read_bytes() == log
