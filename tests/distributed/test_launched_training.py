"""Training under real launchers, with faults; the weights are those of a run without any.

All jobs run at once, because most of their time is imports.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.engine.checkpoint.saved import newest
from tests.helpers.jobs import digest, write_config, write_shards
from tests.helpers.paths import ROOT

STEPS = 120
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ONE_OR_TWO_NODES = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
    "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-conf=last_call_timeout=15",
    "--rdzv-id=shrinks",
]  # fmt: skip
ALONE = (
    "import sys; from megatron.launch import start_ranks; del sys.argv[0]; sys.exit(start_ranks(2))"
)


def begin(command: list, config: Path, **variables: str) -> subprocess.Popen:
    """Start training in the folder of `config`; its output is `output` there."""
    with (config.parent / "output").open("a") as output:
        return subprocess.Popen(
            [*command, ROOT / "train.py", config], cwd=config.parent, stdout=output,
            stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        )  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("localhost", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)


def srun(rank: int) -> dict[str, str]:
    """The variables of a task of `srun --ntasks=2`."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    return step | place | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node1"}


def wait_for_checkpoint(run: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not (run / "latest").exists():
        assert process.poll() is None and time.monotonic() < until
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
    sruns = [begin([sys.executable], configs["srun"], **srun(rank)) for rank in (0, 1)]
    share = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    killed = begin([*TORCHRUN, "--max-restarts=1"], configs["killed"], **share)
    left = begin([sys.executable, "-c", ALONE], configs["left"])
    port = free_port()
    nodes = [*ONE_OR_TWO_NODES, f"--rdzv-endpoint=localhost:{port}"]
    shrinks = [begin(nodes, configs["shrinks"], **share)]
    wait_for_port(port)  # so that this node, which survives, holds the endpoint
    shrinks.append(begin(nodes, configs["shrinks"], **share))
    processes = {"srun": sruns, "killed": [killed], "left": [left], "shrinks": shrinks}
    started = [process for many in processes.values() for process in many]
    try:
        wait_for_checkpoint(folder / "killed" / "run", killed)
        psutil.Process(killed.pid).children()[1].kill()
        wait_for_checkpoint(folder / "left" / "run", left)
        left.send_signal(signal.SIGTERM)
        wait_for_checkpoint(folder / "shrinks" / "run", shrinks[0])
        shrinks[1].kill()
        for each in started:
            each.wait(120)
    finally:
        for each in started:
            each.kill()
    yield folder, {name: [each.returncode for each in many] for name, many in processes.items()}


def test_tasks_of_srun_train_as_one_job(jobs):
    folder, codes = jobs
    output = (folder / "srun" / "output").read_text()
    assert codes["srun"] == [0, 0], output
    assert "1 x 2 x 1 cpu" in output and newest(folder / "srun" / "run").step == STEPS


def test_torchrun_restarts_a_job_whose_rank_was_killed(jobs):
    folder, codes = jobs
    output = (folder / "killed" / "output").read_text()
    assert codes["killed"] == [0] and "resuming" in output, output
    assert digest(folder / "killed" / "run") == digest(folder / "srun" / "run")


def test_train_alone_passes_a_signal_on_and_goes_on_later(jobs):
    folder, codes = jobs
    output = (folder / "left" / "output").read_text()
    assert codes["left"] == [0], output
    assert "SIGTERM: leaving after this step" in output and newest(folder / "left" / "run").step > 0


def test_a_job_goes_on_with_fewer_nodes(jobs):
    folder, codes = jobs
    output = (folder / "shrinks" / "output").read_text()
    assert codes["shrinks"] == [0, -signal.SIGKILL], output
    assert "1 x 2 x 1 cpu" in output and "1 x 1 x 1 cpu" in output and "resuming from" in output
    assert newest(folder / "shrinks" / "run").step == STEPS
