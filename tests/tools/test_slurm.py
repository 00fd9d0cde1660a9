"""Test the Slurm template: bash runs it, with fake commands `srun` and `scontrol`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo "$STUB_HOSTS" | tr , '\\n'; exit; fi
echo "$@" >> "$STUB_DIR/scontrol"
"""
SWEEP = """#!/usr/bin/env bash
trap 'echo saved; exit 130' USR1
echo "$@"
for _ in {1..1000}; do [[ -v STUB_WAITS ]] || exit 3; sleep 0.05; done
"""
RECORDING_SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$STUB_DIR/srun.tmp" && mv "$STUB_DIR/srun.tmp" "$STUB_DIR/srun"
exec sleep "$STUB_SLEEP"
"""
RUNNING_SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
shift && exec "$STUB_PYTHON" -m torch.distributed.run "$@"
"""
TRAIN = """
import json, os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
record = {name: os.environ[name] for name in names} | {"argv": sys.argv[1:]}
def save(*_):
    open(f"saved{record['RANK']}", "w")
    sys.exit()
signal.signal(signal.SIGUSR1, save)
json.dump(record, open(f"rank{record['RANK']}.tmp", "w"))
os.rename(f"rank{record['RANK']}.tmp", f"rank{record['RANK']}.json")
time.sleep(400)
"""


def start(
    folder: Path,
    repo_root: Path,
    srun: str,
    *arguments: str,
    script: str = "train.sbatch",
    **variables: str,
):
    binaries = folder / "bin"
    binaries.mkdir()
    for name, text in (("srun", srun), ("scontrol", SCONTROL), ("python", SWEEP)):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "STUB_DIR": str(folder),
        "STUB_HOSTS": "node1,node2,node3",
        "STUB_SLEEP": "0",
        "STUB_PYTHON": sys.executable,
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_CPUS_PER_TASK": "8",
    }
    return subprocess.Popen(
        ["bash", str(repo_root / "tools" / "slurm" / script), *arguments],
        env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def make_checkout(folder: Path) -> None:
    """Write the file by which the script knows a checkout."""
    (folder / "megatron").mkdir()
    (folder / "megatron" / "shipped.py").touch()


@pytest.mark.parametrize("checkout", [True, False])
def test_every_node_gets_one_torchrun_with_one_rendezvous(tmp_path, repo_root, checkout):
    files = ("a.yml", "b c.yml", "-o", "train_iters=5")
    if checkout:
        make_checkout(tmp_path)
    job = start(tmp_path, repo_root, RECORDING_SRUN, *files, SLURM_RESTART_COUNT="2")
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert (tmp_path / "srun").read_text().splitlines() == [
        "--kill-on-bad-exit=1",
        "torchrun",
        "--nnodes=3",
        "--nproc-per-node=gpu",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node1:24242",
        "--rdzv-id=4242-2",
        "--max-restarts=0",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        *(["train.py"] if checkout else ["--no-python", "kerple", "train"]),
        *files,
    ]
    assert not (tmp_path / "scontrol").exists()


def test_before_the_time_limit_every_process_saves_and_then_the_job_is_requeued(
    tmp_path, repo_root
):
    make_checkout(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    here = {"STUB_HOSTS": "localhost", "PROCS_PER_NODE": "2"}
    job = start(tmp_path, repo_root, RUNNING_SRUN, "a.yml", "-o", "x=1", **here)
    records = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    deadline = time.monotonic() + 200
    while not all(record.exists() for record in records):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    for rank, record in enumerate(records):
        assert json.loads(record.read_text()) == {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
            "TORCHELASTIC_RUN_ID": "4242-0", "argv": ["a.yml", "-o", "x=1"],
        }  # fmt: skip
        assert (tmp_path / f"saved{rank}").exists(), output
    assert (tmp_path / "scontrol").read_text() == "requeue 4242\n"
    assert output.index("saves a checkpoint") < output.index("requeueing job 4242")


def test_an_error_in_training_is_the_jobs_error_and_requeues_nothing(tmp_path, repo_root):
    job = start(tmp_path, repo_root, "#!/usr/bin/env bash\nexit 3\n")
    job.communicate(timeout=200)
    assert job.returncode == 3
    assert not (tmp_path / "scontrol").exists()


def test_a_task_of_an_array_runs_one_cell(tmp_path, repo_root):
    task = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "4243", "script": "sweep.sbatch"}
    (tmp_path / "a").mkdir()
    job = start(tmp_path / "a", repo_root, "", "grid.yml", "--set", "a=b c", **task)
    output, _ = job.communicate(timeout=200)
    assert output == "tools/sweep.py grid.yml --set a=b c --cell 7\n" and job.returncode == 3
    (tmp_path / "b").mkdir()
    job = start(tmp_path / "b", repo_root, "", "grid.yml", STUB_WAITS="", **task)
    assert job.stdout.readline() == "tools/sweep.py grid.yml --cell 7\n"
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=200)
    assert output == "saved\nrequeueing cell 7\n" and job.returncode == 0
    assert (tmp_path / "b" / "scontrol").read_text() == "requeue 4243_7\n"


@pytest.mark.parametrize("line", ["--requeue", "--ntasks-per-node=1", "--open-mode=append"])
def test_slurm_reads_the_options_before_the_first_command(repo_root, line):
    text = (repo_root / "tools" / "slurm" / "train.sbatch").read_text()
    assert f"#SBATCH {line}\n" in text.split("\nset -euo pipefail")[0]
