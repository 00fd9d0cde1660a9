"""Training under real launchers, with faults; the weights are those of a run without any.

All jobs run at once, because most of their time is imports. A job that meets a fault prints into a
pipe of one page that nobody reads before the fault. So it waits in `print`, after some 25 steps,
and cannot end before its fault, however fast or slow the machine is. torchrun, its ranks and srun's
tasks are forked from a process that has done the imports. The ranks that `train.py` itself starts
are new interpreters.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed.run

from megatron.engine.checkpoint.saved_checkpoints import newest
from tests.helpers.jobs import digest, write_config, write_shards
from tests.helpers.launch import free_port, start_script
from tests.helpers.paths import ROOT

STEPS = 50
"""Twice as many as the pipe holds lines of."""
TORCHRUN = [torch.distributed.run.__file__, "--standalone", "--nproc-per-node=2"]
ONE_OR_TWO_NODES = [
    torch.distributed.run.__file__, "--nnodes=1:2", "--nproc-per-node=1",
    "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=shrinks",
]  # fmt: skip
LAST_CALL = 25
"""The seconds that torchrun waits for a second node. Both nodes start at the same time, so they
come seconds apart at most, even on a busy machine."""
PATIENCE = 400
"""Seconds for all that happens here, on a busy machine. An idle one with two cores needs 80."""
ALONE = (
    "import sys; from megatron.launcher import start_ranks; del sys.argv[0]; "
    "sys.exit(start_ranks(2))"
)


class Started:
    """Training in the folder of `config`; its output is `output` there.

    Args:
        held: Whether stdout goes into a pipe that `release` reads. stderr goes into `output`.
    """

    def __init__(self, command: list, config: Path, held: bool = False, **variables: str):
        self.output = config.parent / "output"
        self.folder_of_ranks = config.parent / "ranks"
        self.folder_of_ranks.mkdir(exist_ok=True)
        argv = [*map(str, command), str(ROOT / "train.py"), str(config)]
        environ = os.environ | {"PYTHONPATH": str(ROOT)} | variables
        if command[:1] == TORCHRUN[:1]:
            environ["FORKED_RANKS"] = str(self.folder_of_ranks)
        printed, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4096)
        self.printed = os.fdopen(printed)
        with self.output.open("a") as file, os.fdopen(into, "w") as pipe:
            self.process = start_script(
                argv, (pipe if held else file).fileno(), errors=file.fileno(),
                cwd=config.parent, environ=environ,
            )  # fmt: skip

    def ranks(self) -> list[int]:
        """The processes of the ranks that a torchrun has started."""
        path = self.folder_of_ranks / str(self.process.pid)
        return list(map(int, path.read_text().split())) if path.exists() else []

    def release(self) -> None:
        """Let the job go on, which prints into `output` from now on."""
        with self.output.open("a") as output, self.printed:
            subprocess.Popen(["cat"], stdin=self.printed, stdout=output)


def srun(rank: int) -> dict[str, str]:
    """The variables of a task of `srun --ntasks=2`."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    return step | place | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node1"}


def wait_for(happens: Callable[[], bool], job: Started, until: float) -> None:
    while not happens():
        assert job.process.exitcode is None and time.monotonic() < until, job.output.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Run four jobs: one under srun, and three that meet a killed rank, a signal or a lost node."""
    folder = tmp_path_factory.mktemp("jobs")
    prefix = write_shards(folder)
    keys = {"train_iters": STEPS, "save_interval": 10, "save": "run", "load": "run"}
    keys |= {"eval_iters": 0, "train_micro_batch_size_per_gpu": 2, "hidden_dropout": 0.1}
    configs = {
        name: write_config(folder / name / "c.yml", prefix, **keys)
        for name in ("srun", "killed", "left", "shrinks")
    }
    with configs["shrinks"].open("a") as file:
        file.write("train_batch_size: 4\n")
    sruns = [Started([], configs["srun"], **srun(rank)) for rank in (0, 1)]
    share = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    killed = Started([*TORCHRUN, "--max-restarts=1"], configs["killed"], held=True, **share)
    alone = folder / "alone.py"
    alone.write_text(ALONE)
    left = Started([alone], configs["left"], held=True)
    nodes = [*ONE_OR_TWO_NODES, f"--rdzv-endpoint=localhost:{free_port()}"]
    shrinks = [
        Started(
            [*nodes, f"--rdzv-conf=is_host={host},last_call_timeout={LAST_CALL},read_timeout=200"],
            configs["shrinks"],
            held=True,
            **share,
        )  # fmt: skip
        for host in (1, 0)  # the node that survives holds the store
    ]
    every = {"srun": sruns, "killed": [killed], "left": [left], "shrinks": shrinks}
    started = [job for many in every.values() for job in many]
    until = time.monotonic() + PATIENCE
    try:
        wait_for((folder / "killed" / "run" / "latest").exists, killed, until)
        os.kill(killed.ranks()[1], signal.SIGKILL)
        killed.release()
        wait_for((folder / "left" / "run" / "latest").exists, left, until)
        left.process.terminate()
        wait_for(lambda: "leaving after this step" in left.output.read_text(), left, until)
        left.release()
        wait_for((folder / "shrinks" / "run" / "latest").exists, shrinks[0], until)
        for process in (shrinks[1].process.pid, *shrinks[1].ranks()):
            os.kill(process, signal.SIGKILL)
        for job in shrinks:
            job.release()
        for job in started:
            job.process.join(until - time.monotonic())  # its test shows the output of the others
        codes = {name: [job.process.exitcode for job in many] for name, many in every.items()}
    finally:
        for job in started:
            job.process.kill()
            for rank in job.ranks():
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            job.printed.close()
    yield folder, codes


pytestmark = pytest.mark.timeout(PATIENCE + 60)


def test_tasks_of_srun_train_as_one_job(jobs):
    folder, codes = jobs
    output = (folder / "srun" / "output").read_text()
    assert codes["srun"] == [0, 0], output
    assert "1 x 2 x 1 cpu" in output and newest(folder / "srun" / "run").step == STEPS


def test_torchrun_restarts_a_job_whose_rank_was_killed(jobs):
    folder, codes = jobs
    output = (folder / "killed" / "output").read_text()
    assert codes["killed"] == [0] and "resuming" in output, output
    assert "leaving" not in output  # though torchrun sent SIGTERM to the other rank
    assert digest(folder / "killed" / "run") == digest(folder / "srun" / "run")


def test_train_alone_passes_a_signal_on_and_goes_on_later(jobs):
    folder, codes = jobs
    output = (folder / "left" / "output").read_text()
    assert codes["left"] == [0], output
    assert re.search("SIGTERM at rank [01] on .*: leaving after this step", output), output
    assert newest(folder / "left" / "run").step > 0


def test_a_job_goes_on_with_fewer_nodes(jobs):
    folder, codes = jobs
    output = (folder / "shrinks" / "output").read_text()
    assert codes["shrinks"] == [0, -signal.SIGKILL], output
    assert "1 x 2 x 1 cpu" in output and "1 x 1 x 1 cpu" in output and "resuming from" in output
    assert newest(folder / "shrinks" / "run").step == STEPS
