"""Follow the page "Your model on 8 GPUs": run its commands in their order, on a CPU.

The commands are read from the page. `SMALLER` says what is replaced in them, and the page has the
same list in words. Bash runs Slurm's commands with stand-ins: `sbatch` becomes the job, `scancel`
sends it the signal. `kerple NAME` and `torchrun` are forked from a process that has imported torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.run
import yaml

from tests.helpers.launch import run_script
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "your_model.md").read_text()
COMMANDS = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)).splitlines()
[CHANGES] = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S))

SMALLER = {
    "--gpus 8": "--gpus 2",
    "--nproc-per-node=8": "--nproc-per-node=2",
    "--gpus-per-node=8": "--gpus-per-node=2",
    "--size 32768": "--size 300",
    "--workers 8": "--workers 1",
    "--max-new-tokens 200": "--max-new-tokens 5",
    " my.yml": " my.yml small.yml",
}
SMALL = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
    "seq_length": 64, "max_position_embeddings": 64, "split": "6,2,2",
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "train_iters": 30,
    "lr_decay_iters": 30, "eval_interval": 30, "eval_iters": 1, "log_interval": 1,
    "eval_lengths": [64, 128], "eval_tokens": 256, "eval_suite_tokens": 512,
}  # fmt: skip
STANDINS = {
    "kerple": f"""export PYTHONPATH={ROOT}
exec {sys.executable} -c 'import sys; from megatron.shipped import kerple_command
sys.exit(kerple_command())' "$@" """,
    "python": f'PYTHONPATH={ROOT} exec {sys.executable} "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "sbatch": """while [[ $1 == -* ]]; do [[ $1 != --gpus* ]] || gpus=${1#*=}; shift; done
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_SUBMIT_DIR=$PWD SLURM_GPUS_ON_NODE=$gpus
export PROCS_PER_NODE=$gpus
echo $$ > job; exec bash "$@" """,
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "scontrol": '[[ $1 == show ]] && echo localhost || echo "$@" >> scontrol.txt',
    "scancel": 'kill -USR1 "$(cat job)"',
}


def command(start: str) -> str:
    """Return the command of the page that begins with `start`, made small."""
    [found] = [line for line in COMMANDS if line.startswith(start)]
    for said, smaller in SMALLER.items():
        found = found if found.startswith("cp ") else found.replace(said, smaller)
    return found


class Follower:
    """Runs commands of the page in one folder, in the page's order."""

    def __init__(self, folder: Path):
        self.folder, self.done = folder, []
        for name, text in STANDINS.items():
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/usr/bin/env bash\n{text}\n")
            path.chmod(0o755)

        self.environment = {key: os.environ[key] for key in os.environ if key != "WORLD_SIZE"}
        self.environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"

    def begin(self, start: str) -> subprocess.Popen:
        self.done.append(start)
        return subprocess.Popen(
            ["bash", "-c", command(start)], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, start: str) -> str:
        program, *arguments = shlex.split(command(start))
        if program in ("kerple", "torchrun"):
            self.done.append(start)
            script = Path(torch.distributed.run.__file__)
            if program == "kerple":
                name, *arguments = arguments
                script = ROOT / {"prepare": "prepare_data.py"}.get(name, f"{name}.py")
                script = script if script.is_file() else ROOT / f"tools/{name.replace('-', '_')}.py"
            environ = self.environment
            code, output = run_script(script, *arguments, cwd=self.folder, environ=environ)
        else:
            process = self.begin(start)
            output, _ = process.communicate(timeout=400)
            code = process.returncode
        assert code == 0, output
        return output


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Run every command, and return the folder and what each printed."""
    folder = tmp_path_factory.mktemp("my")
    follower, printed = Follower(folder), {}

    def run(*starts: str) -> None:
        printed.update({start: follower.run(start) for start in starts})

    (folder / "texts").mkdir()
    for number, source in enumerate(sorted((ROOT / "docs").glob("*.md"))[:24]):
        (folder / "texts" / f"{number}.txt").write_text(source.read_text())
    run("kerple train-tokenizer", "kerple prepare", "kerple inspect", "cp")
    lines = (folder / "my.yml").read_text().splitlines()
    kept = [line for line in lines if line.partition(":")[0] not in CHANGES]
    (folder / "my.yml").write_text("\n".join(kept) + "\n" + yaml.safe_dump(CHANGES))
    # The signal must come before the last step. So the job has many steps, and the restarted job
    # few. `test_preemption` resumes with an unchanged config.
    (folder / "small.yml").write_text(yaml.safe_dump(SMALL | {"train_iters": 3000}))
    run(*(f"kerple train my.yml --{name}" for name in ("check", "plan", "rehearse")))
    job = follower.begin("sbatch")
    try:
        log = folder / "runs" / "mine" / "log.txt"
        while not (log.is_file() and "step 2/" in log.read_text()):
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.05)
        run("scancel")
        printed["sbatch"] = job.communicate(timeout=400)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    (folder / "small.yml").write_text(yaml.safe_dump(SMALL | {"train_iters": left_at(folder) + 9}))
    run("torchrun", "kerple evaluate", "kerple generate", "kerple export-hf")
    follower.done += ["tail", "tensorboard"]
    assert sorted(command(start) for start in follower.done) == sorted(map(command, COMMANDS))
    return folder, printed


def left_at(folder: Path) -> int:
    """Return the step at which the signal ended the job."""
    return int(re.search(r"left after step (\d+)", (folder / "runs/mine/log.txt").read_text())[1])


def test_the_data_are_checked_and_planned(followed):
    folder, printed = followed
    assert printed["kerple train-tokenizer"] == "data/tokenizer.json: 300 tokens\n"
    assert "24 documents" in printed["kerple prepare"]
    assert "the files are whole" in printed["kerple inspect"]
    assert "not ready" not in printed["kerple train my.yml --check"]
    assert "fits into 90% of 80" in printed["kerple train my.yml --plan"]
    assert "2 ranks rehearsed" in printed["kerple train my.yml --rehearse"]


def test_the_job_saves_at_the_signal_and_is_requeued(followed):
    folder, printed = followed
    assert printed["sbatch"] == "the output is in runs/mine/slurm-7.out\n"
    log = (folder / "runs/mine/slurm-7.out").read_text()
    assert log.index("saves a checkpoint") < log.index("left after step")
    assert log.endswith("requeueing job 7\n")
    assert (folder / "scontrol.txt").read_text() == "requeue 7\n"


def test_the_next_start_resumes_and_ends_the_run(followed):
    folder, printed = followed
    left = left_at(folder)
    rows = map(json.loads, (folder / "runs/mine/metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert left >= 2 and steps == list(range(1, left + 10))
    assert f"step {left + 1}/{left + 9}" in printed["torchrun"]
    assert f"step {left}/" not in printed["torchrun"]


def test_what_the_page_shows_to_watch_is_there(followed):
    folder, _ = followed
    shown = command("tail").split()[-1], command("tensorboard").split()[-1]
    assert (folder / shown[0]).is_file() and [*(folder / shown[1]).rglob("events*")]


def test_the_model_is_measured_used_and_exported(followed):
    folder, printed = followed
    assert (folder / "runs/mine/extrapolation.csv").is_file()
    assert (folder / "runs/mine/suite/report.md").is_file()
    assert printed["kerple generate"].strip()
    card = (folder / "exported/README.md").read_text()
    assert "license: apache-2.0" in card and "kerple_log" in card
    for named in ("mine_text_document", "erplexity", "verdict"):
        assert named in card, card
    assert (folder / "exported/model.safetensors").is_file()


def test_the_page_says_what_is_replaced():
    """What the table of the page says must stand in the commands."""
    for said in SMALLER:
        assert any(said in line for line in COMMANDS), said
    table = PAGE.partition("| on this page | in the test |")[2]
    for row in ("8 GPUs", "32,768 tokens", "`my.yml`", "`sbatch`", "`tail -f`, `tensorboard`"):
        assert f"| {row}" in table
    values = {said: smaller.split()[-1] for said, smaller in SMALLER.items()}
    assert f"| {values['--size 32768']} |" in table
    assert f"| {values['--workers 8']}, {values['--max-new-tokens 200']} |" in table
