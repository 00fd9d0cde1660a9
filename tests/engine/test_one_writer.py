"""Two jobs in one `save` folder: real processes that start at once, are killed, or are replaced."""

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatron.engine.checkpoint import write
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import Saved, finished
from megatron.engine.errors import CheckpointError
from megatron.engine.job import lease
from megatron.parallel.groups import build_groups
from tests.helpers.jobs import digest, rows, write_run_config
from tests.helpers.launch import call, run_script
from tests.helpers.paths import ROOT

PAUSING = """
import runpy, sys, time
from pathlib import Path
from megatron.engine.run_log.log import RunLog

def record_and_pause(self, step, *args, **kwargs):
    record(self, step, *args, **kwargs)
    while step == 30 and not Path(sys.argv[1]).with_name("go").exists():
        time.sleep(0.02)

record, RunLog.metrics = RunLog.metrics, record_and_pause
runpy.run_path("train.py", run_name="__main__")
"""
"""Runs `train.py`, which waits after step 30 until there is a file `go` beside the config."""


def start(pool, config):
    """Start a pausing `train.py config` in a process of its own."""
    script = config.with_name("pausing.py")
    script.write_text(PAUSING)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return pool.submit(run_script, script, config, cwd=ROOT, environ=environ)


def wait_for_pause(run):
    wait_for(lambda: (run / "metrics.jsonl").exists() and max(rows(run), default=0) == 30)


def wait_for(condition):
    deadline = time.monotonic() + 200
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def holder(run):
    """The description of the process that holds the lease of `run`; None if none does."""
    for path in run.glob(".lease-*"):
        return json.loads(path.read_text() or "null")


def config_at(folder, prefix, **changes):
    keys = {"train_micro_batch_size_per_gpu": 4, "train_iters": 400}
    keys |= {"save_interval": 20, "eval_iters": 0}
    return write_run_config(folder, prefix, **(keys | changes))


def test_of_two_starts_at_once_one_is_refused_and_a_killed_one_is_followed_at_once(folder, prefix):
    """They are two tasks of `srun` without a rendezvous: each is a job of one process."""
    config, run = config_at(folder / "twice", prefix)
    with ThreadPoolExecutor(2) as pool:
        jobs = [start(pool, config), start(pool, config)]
        refused, writer = wait_for(lambda: sorted(jobs, key=lambda job: not job.done())
                                   if any(job.done() for job in jobs) else None)  # fmt: skip
        code, text = refused.result()
        pid = holder(run)["pid"]
        assert code == 1 and "Traceback" not in text
        assert f"error: save: {run} is in use by process {pid} on " in text
        assert "name another `save`, or stop that job first" in text
        wait_for_pause(run)
        os.kill(pid, signal.SIGKILL)
        code, text = writer.result()
        assert code == -signal.SIGKILL
    assert (run / ".lease-1").exists() and max(rows(run)) == 30
    text = call("train.py", config, "-o", "exit_interval=60")
    assert "looking whether it is alive" not in text and "resuming from" in text
    assert not list(run.glob(".*")) and not (run / "metrics.jsonl.previous").exists()
    lineages = {each.record.lineage for each in finished(run)}
    assert len(lineages) == 1 and len(lineages.pop()) == 32
    whole, alone = config_at(folder / "alone", prefix)
    call("train.py", whole, "-o", f"exit_interval={max(rows(run))}")
    assert digest(run) == digest(alone) and rows(run) == rows(alone)


def test_a_job_whose_folder_was_taken_over_writes_nothing_more(folder, prefix):
    config, run = config_at(folder / "taken", prefix, keep_last_n_checkpoints=1)
    with ThreadPoolExecutor(1) as pool:
        job = start(pool, config)
        wait_for_pause(run)
        pid = holder(run)["pid"]
        os.kill(pid, signal.SIGSTOP)
        (run / ".lease-2").write_text(json.dumps({"host": "elsewhere", "pid": 5}))
        (run / ".lease-1").unlink()
        config.with_name("go").touch()
        os.kill(pid, signal.SIGCONT)
        code, text = job.result()
    assert code == 1 and "Traceback" not in text and "step 31/400" not in text
    assert f"error: save: {run} is no longer this job's (process 5 on elsewhere (" in text
    assert max(rows(run)) == 30 and (run / "latest").read_text() == "global_step20"
    assert holder(run)["pid"] == 5


def test_of_two_runs_without_save_the_second_is_refused(folder, prefix):
    config, _ = config_at(folder / "unsaved", prefix, train_iters=2)
    given = [config, "-o", "save=null", "-o", "load=null"]
    with lease.sole_writer(folder / "runs" / "unsaved"):
        code, text = run_script(ROOT / "train.py", *given, cwd=folder, environ=dict(os.environ))
    assert (
        code == 1
        and "error: save: runs/unsaved is in use by process" in text
        and "another `save`" in text
    )
    assert not (folder / "runs" / "unsaved" / "metrics.jsonl").exists()


def test_an_evaluation_needs_no_lease_and_changes_nothing(folder, prefix):
    config, run = config_at(folder / "read", prefix, train_iters=2)
    call("train.py", config, "-o", "eval_iters=1")
    (run / ".unfinished-global_step4").mkdir()
    before = (run / "metrics.jsonl").read_text()
    with lease.sole_writer(run):
        text = call("train.py", config, "-o", "train_iters=0", "-o", "eval_iters=1")
        assert "evaluating" in text and (run / ".unfinished-global_step4").is_dir()
    assert "final/" in before and (run / "metrics.jsonl").read_text().startswith(before)


def test_without_latest_it_starts_only_when_allowed(folder, prefix):
    config, run = config_at(folder / "latest", prefix, train_iters=4, save_interval=2)
    call("train.py", config)
    (run / "latest").unlink()
    shutil.copytree(run, folder / "before")
    text = call("train.py", config, code=1)
    assert f"{run / 'latest'} is missing, but {run / 'global_step4'} is there" in text
    assert "Traceback" not in text and digest_of(run) == digest_of(folder / "before")
    text = call("train.py", config, "--allow-fallback", "-o", "train_iters=5")
    assert f"resuming from {run / 'global_step4'} (passed over: " in text and "step 5/5" in text
    assert max(rows(run)) == 5 and min(rows(run)) == 1


def digest_of(folder):
    """Every file's content, by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_job_that_lost_its_folder_removes_no_unfinished_checkpoint(tmp_path):
    (tmp_path / ".unfinished-global_step5").mkdir()
    (tmp_path / ".unfinished-global_step5" / "of_another_job").touch()

    def lost():
        raise CheckpointError("is no longer this job's")

    to, saved = (
        write.Destination(tmp_path, RunDescription(), confirm=lost),
        Saved(tmp_path, "global_step5"),
    )
    with pytest.raises(CheckpointError, match="no longer"):
        write.write_state(SimpleNamespace(), build_groups(torch.device("cpu")), saved, to)
    assert (tmp_path / ".unfinished-global_step5" / "of_another_job").exists()
