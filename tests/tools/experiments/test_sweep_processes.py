"""Test how tools/sweep.py gives devices and signals to the processes of its cells."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml

from tests.helpers.jobs import BASE
from tools import sweep, table
from tools.experiments import runner
from tools.experiments.grid import read_grid


class Fake:
    """A process that ends with `code`, or that waits for a signal if `code` is None."""

    started: list[Fake]
    code: int | None = 0

    def __init__(self, command, log, environ):
        self.command, self.device = command, environ.get("CUDA_VISIBLE_DEVICES")
        self.threads = environ["OMP_NUM_THREADS"]
        self.returncode, self.signals = self.code, []
        Fake.started.append(self)
        if self.code is None:
            signal.raise_signal(signal.SIGINT)  # before the sweep has listed this process

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        self.signals.append(number)
        signal.raise_signal(signal.SIGINT)  # the user is impatient

    def kill(self):
        self.signals.append(signal.SIGKILL)
        self.returncode = -signal.SIGKILL


@pytest.fixture
def grid(tmp_path, monkeypatch, start_forked) -> Path:
    """Return a grid of four cells of two processes each, which `Fake` starts."""
    monkeypatch.setattr(runner, "start", Fake)
    monkeypatch.setattr(Fake, "started", [], raising=False)
    monkeypatch.setattr(Fake, "code", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    base = {key: value for key, value in BASE.items() if key != "tokenizer_type"}
    base |= {"data_path": "builtin:parity", "train_micro_batch_size_per_gpu": 1}
    base |= {"task_options": {"max_length": 8}, "split": None}
    (tmp_path / "base.yml").write_text(yaml.safe_dump(base))
    content = {
        "runs": str(tmp_path / "runs"), "configs": [str(tmp_path / "base.yml")], "processes": 2,
        "axes": {"kind": ["a"]}, "seeds": [1, 2, 3, 4], "lengths": [8],
    }  # fmt: skip
    path = tmp_path / "grid.yml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_hidden_gpus_are_no_gpus(grid, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert sweep.main([str(grid), "--jobs", "2"]) == 0
    assert "2 of 4 cells ended, 0 running" in capsys.readouterr().out  # two at a time
    assert len(Fake.started) == 4 and {each.device for each in Fake.started} == {"-1"}


def test_each_cell_has_its_gpus(grid, capsys):
    assert sweep.main([str(grid), "--gpus", "4,5,6,7,8"]) == 0
    assert {each.device for each in Fake.started} == {"4,5", "6,7"} and len(Fake.started) == 4
    for each in Fake.started:
        assert each.command[1:4] == ["-m", "torch.distributed.run", "--standalone"]
        assert "--nproc-per-node=2" in each.command
    assert "time left: 0:00:00" in capsys.readouterr().out
    index = pd.read_csv(grid.parent / "runs" / "cells.csv")
    assert set(index["state"]) == {"cut off"}  # a code of 0 alone does not make a cell finished
    with pytest.raises(SystemExit):
        sweep.main([str(grid), "--gpus", "4"])
    assert "a cell needs 2 GPUs, and there are 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(12, None, "3"), (3, None, "1"), (12, "5", "5")]
)
def test_cells_share_the_cores(grid, monkeypatch, cores, given, threads):
    """Two cells at a time, of two processes each: each process has a quarter of the cores."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert sweep.main([str(grid), "--jobs", "2"]) == 0
    assert [each.threads for each in Fake.started] == [threads] * 4
    if cores == 12 and not given:  # a single cell of two processes, whatever may run beside it
        assert sweep.main([str(grid), "--jobs", "8", "--cell", "0"]) == 0
        assert Fake.started[-1].threads == "6"


def test_a_signal_while_a_cell_starts_and_a_second_one(grid, monkeypatch):
    monkeypatch.setattr(Fake, "code", None)
    assert sweep.main([str(grid), "--jobs", "1"]) == 130
    assert [each.signals for each in Fake.started] == [[signal.SIGTERM, signal.SIGKILL]]


def test_an_error_of_the_sweep_ends_its_cells(grid, monkeypatch):
    monkeypatch.setattr(runner, "share_done", lambda _: 1 / len(Fake.started))
    monkeypatch.setattr(Fake, "send_signal", lambda self, number: self.signals.append(number))
    monkeypatch.setattr(Fake, "poll", lambda self: None)
    with pytest.raises(ZeroDivisionError):
        sweep.main([str(grid), "--jobs", "2"])
    assert Fake.started == []
    monkeypatch.setattr(runner, "share_done", lambda _: 1 / (1 - len(Fake.started)))
    with pytest.raises(ZeroDivisionError):
        sweep.main([str(grid), "--jobs", "2"])
    assert [each.signals for each in Fake.started] == [[signal.SIGTERM]]


@pytest.mark.parametrize("main", [sweep.main, table.main])
def test_a_variable_is_a_name_and_a_value(grid, capsys, main):
    with pytest.raises(SystemExit) as stopped:
        main([str(grid), "--set", "model"])
    assert stopped.value.code == 2 and "--set: model: write NAME=VALUE" in capsys.readouterr().err


def test_jobs_are_at_least_one(grid, capsys):
    with pytest.raises(SystemExit) as stopped:
        sweep.main([str(grid), "--jobs", "0"])
    assert stopped.value.code == 2 and "--jobs: 0 is not in [1, inf]" in capsys.readouterr().err


def test_the_time_left_by_hand(grid, monkeypatch):
    """Four cells of 100 s each, two at a time. An earlier sweep did half of the first."""
    now, begun, said = [0.0], {}, []

    class Timed:
        returncode = 0

        def __init__(self, *_):
            self.begin = max(begun.values())

        def poll(self):
            return 0 if now[0] >= self.begin + 100 else None

    def share_done(cell):
        begin = begun.setdefault(cell.seed, now[0] - (50 if cell.seed == 1 else 0))
        return min(1.0, (now[0] - begin) / 100)

    def wait(_):
        now[0] += 25

    monkeypatch.setattr(runner, "share_done", share_done)
    monkeypatch.setattr(runner, "start", Timed)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=wait))
    runner.Runner(["", ""], said.append, int).run(read_grid(grid).cells)
    # 3.5 cells of work, and a look each 25 s. A cell starts one look after another has ended.
    # After 50 s, 0.5 + 0.5 are done; after 100 s, 0.5 + 1 + 0.25; after 175 s, 0.5 + 1 + 1 + 0.5.
    left = [line.partition("time left: ")[2] for line in said if "time left" in line]
    assert left == ["0:02:05", "0:01:40", "0:00:29", "0:00:00"]
