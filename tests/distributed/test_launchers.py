"""Launchers as real processes: their tasks become one job, and none outlives its launcher.

All launchers run at once, because most of their time is imports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.engine.job import failure
from tests.helpers.launch import free_port
from tests.helpers.loose import SOON
from tests.helpers.paths import ROOT

TASK = """
import os, sys, time
from datetime import timedelta
from megatron import launcher
launcher.join()
from megatron.engine.job import failure
watch = failure.Watch()
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
ranks = torch.ones(1)
dist.all_reduce(ranks)
with open("rank" + os.environ["RANK"], "a") as file:
    while True:
        print(os.getpid(), int(ranks), os.environ["LOCAL_RANK"], file=file, flush=True)
        time.sleep(0.2)  # saves and steps go on, whether or not the others do
"""
ALONE = """
import sys
from megatron import launcher
sys.argv = ["task.py"]
sys.exit(launcher.start_ranks(2))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--allow-run-as-root", "--oversubscribe"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet"]
WAIT = 400
"""Seconds until all launchers have started, on a busy machine."""


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}


class Started:
    """Launchers of one job of two ranks."""

    def __init__(self, folder: Path, *commands: list[str], **variables: str):
        self.folder = folder
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
        with (folder / "output").open("w") as output:
            self.launchers = [
                subprocess.Popen(
                    command, cwd=folder, stdout=output, stderr=subprocess.STDOUT,
                    env=clean() | {"PYTHONPATH": str(ROOT)} | variables | {"TASK": str(number)},
                )
                for number, command in enumerate(commands)
            ]  # fmt: skip

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def rows(self) -> list[list[int]]:
        """(process, ranks in the job, local rank) of each rank, from its newest whole line."""
        paths = [self.folder / f"rank{rank}" for rank in (0, 1)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        return [list(map(int, text.splitlines()[0].split())) for text in texts if "\n" in text]

    def processes(self) -> list[psutil.Process]:
        until = time.monotonic() + WAIT
        while len(rows := self.rows()) < 2:
            ended = any(each.poll() is not None for each in self.launchers)
            assert not ended and time.monotonic() < until, self.output()
            time.sleep(0.2)
        return [psutil.Process(row[0]) for row in rows]


@pytest.fixture
def start():
    """`Started`, whose processes end with the test."""
    jobs: list[Started] = []

    def begin(*arguments, **variables) -> Started:
        jobs.append(Started(*arguments, **variables))
        return jobs[-1]

    yield begin
    for launcher in [each for job in jobs for each in job.launchers]:
        if launcher.poll() is None:
            for process in psutil.Process(launcher.pid).children(recursive=True):
                process.kill()
        launcher.kill()
        launcher.wait()


def test_no_rank_outlives_its_launcher(tmp_path, start):
    (tmp_path / "hostfile").write_text("node1 slots=2\n")
    master = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    nodes = ["--hostfile", "../hostfile", "--no_ssh", "--node_rank", "0"]
    deepspeed = [*DEEPSPEED, *nodes, *master, "task.py"]
    jobs = {
        "torchrun, KILL": ([[*TORCHRUN, "task.py"]], signal.SIGKILL),
        "torchrun and a shell, USR1": (
            [[*TORCHRUN, "--no-python", "bash", "-c", f"{sys.executable} task.py; true"]],
            signal.SIGUSR1,
        ),
        "deepspeed, TERM": ([deepspeed], signal.SIGTERM),
        "mpirun, KILL": ([[*MPIRUN, "-n", "2", sys.executable, "task.py"]], signal.SIGKILL),
        "train.py, KILL": ([[sys.executable, "-c", ALONE]], signal.SIGKILL),
    }
    started = {name: start(tmp_path / name, *job[0]) for name, job in jobs.items()}
    ranks = {name: job.processes() for name, job in started.items()}
    for name, job in started.items():
        assert [row[1] for row in job.rows()] == [2, 2], name
        job.launchers[0].send_signal(jobs[name][1])
    _, alive = psutil.wait_procs([each for both in ranks.values() for each in both], SOON)
    left = [name for name, both in ranks.items() if set(both) & set(alive)]
    for each in alive:
        each.kill()
    assert not left
    for name, job in started.items():
        # mpirun's processes write through mpirun, whose end nobody reads any more
        assert "mpirun" in name or failure.ORPHAN_TEXT in job.output(), name
