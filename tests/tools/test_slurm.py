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
kill "$(cat "$STUB_DIR/srun.pid")"  # Slurm ends what runs in a job that it requeues
"""
RECORDING_SRUN = """#!/usr/bin/env bash
echo $$ > "$STUB_DIR/srun.pid"
printf '%s\\n' "$@" > "$STUB_DIR/srun.tmp" && mv "$STUB_DIR/srun.tmp" "$STUB_DIR/srun"
exec sleep "$STUB_SLEEP"
"""
RUNNING_SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
shift && exec "$STUB_PYTHON" -m torch.distributed.run "$@"
"""
TRAIN = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
record = {name: os.environ[name] for name in names} | {"argv": sys.argv[1:]}
json.dump(record, open(f"rank{record['RANK']}.json", "w"))
"""


def start(folder: Path, repo_root: Path, srun: str, *arguments: str, **variables: str):
    binaries = folder / "bin"
    binaries.mkdir()
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
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
    script = repo_root / "tools" / "slurm" / "train.sbatch"
    return subprocess.Popen(
        ["bash", str(script), *arguments],
        env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_every_node_gets_one_torchrun_with_one_rendezvous(tmp_path, repo_root):
    files = ("a.yml", "b c.yml", "-o", "train_iters=5")
    job = start(tmp_path, repo_root, RECORDING_SRUN, *files, SLURM_RESTART_COUNT="2")
    output, _ = job.communicate(timeout=30)
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
        "train.py",
        *files,
    ]
    assert not (tmp_path / "scontrol").exists()


def test_the_command_really_starts_train_py_under_torchrun(tmp_path, repo_root):
    (tmp_path / "train.py").write_text(TRAIN)
    here = {"STUB_HOSTS": "localhost", "PROCS_PER_NODE": "2"}
    job = start(tmp_path, repo_root, RUNNING_SRUN, "a.yml", "-o", "x=1", **here)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank, record in enumerate(ranks):
        assert record == {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
            "TORCHELASTIC_RUN_ID": "4242-0", "argv": ["a.yml", "-o", "x=1"],
        }  # fmt: skip


def test_an_error_in_training_is_the_jobs_error_and_requeues_nothing(tmp_path, repo_root):
    job = start(tmp_path, repo_root, "#!/usr/bin/env bash\nexit 3\n")
    job.communicate(timeout=30)
    assert job.returncode == 3
    assert not (tmp_path / "scontrol").exists()


def test_the_warning_before_the_time_limit_requeues_the_job(tmp_path, repo_root):
    job = start(tmp_path, repo_root, RECORDING_SRUN, STUB_SLEEP="60")
    deadline = time.monotonic() + 30
    while not (tmp_path / "srun").exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert (tmp_path / "scontrol").read_text() == "requeue 4242\n"
    assert "requeueing job 4242" in output
    assert job.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("line", ["--requeue", "--ntasks-per-node=1", "--open-mode=append"])
def test_slurm_reads_the_options_before_the_first_command(repo_root, line):
    text = (repo_root / "tools" / "slurm" / "train.sbatch").read_text()
    assert f"#SBATCH {line}\n" in text.split("\nset -euo pipefail")[0]
