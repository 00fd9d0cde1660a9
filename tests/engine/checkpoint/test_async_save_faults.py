"""Faults while a checkpoint is written beside training: kills, full and slow disks, no memory."""

import contextlib
import io
import os
import re
import signal
import time

import pytest
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from megatron.config import load_config
from megatron.engine.checkpoint import async_save
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.pretraining.run import Job
from tests.helpers.jobs import digest, rows, write_run_config
from tests.helpers.launch import call, run_ranks, run_script
from tests.helpers.paths import ROOT

FAULTY = """
import os, resource, runpy, signal, sys
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from megatron.engine.checkpoint import publish

def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def in_a_file(self, state, path):
    if "step20/zero" in path:
        open(path, "wb").write(b"half")
        kill()
    write(self, state, path)

def before_latest(path):
    flush(path)
    if path.name == "run" and (path / "global_step20").exists():
        kill()

def on_a_full_disk(self, state, path):
    if "step20" in path:  # longer files cannot be written: EFBIG instead of ENOSPC
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    write(self, state, path)

write, flush = TorchCheckpointEngine.save, publish.flush
if os.environ["FAULT"] == "before_latest":
    publish.flush = before_latest
else:
    TorchCheckpointEngine.save = globals()[os.environ["FAULT"]]
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def config_at(folder, prefix, **changes):
    keys = {"train_batch_size": 4, "train_iters": 60, "save_interval": 10}
    keys |= {"eval_iters": 0, "async_save": True, "hidden_dropout": 0.1}
    return write_run_config(folder, prefix, **(keys | changes))


@pytest.fixture(scope="module")
def undisturbed(folder, prefix):
    config, run = config_at(folder / "alone", prefix, async_save=False)
    call("train.py", config)
    return run


def run_with(fault, config, folder):
    script = folder / "faulty.py"
    script.write_text(FAULTY)
    environ = os.environ | {"FAULT": fault, "PYTHONPATH": str(ROOT)}
    return run_script(script, ROOT / "train.py", config, cwd=ROOT, environ=environ)


@pytest.mark.parametrize(("fault", "step"), [("in_a_file", 10), ("before_latest", 20)])
def test_a_kill_while_writing_loses_at_most_that_checkpoint(
    undisturbed, folder, prefix, fault, step
):
    config, run = config_at(folder / fault, prefix)
    code, text = run_with(fault, config, folder)
    assert code == -signal.SIGKILL and f"saved {run / 'global_step10'}" in text
    assert (run / "latest").read_text() == "global_step10"
    text = call("train.py", config)
    assert f"resuming from {run / f'global_step{step}'}" in text
    assert digest(run) == digest(undisturbed) and rows(run) == rows(undisturbed)
    assert not list(run.glob(".*"))


def test_a_full_disk_ends_the_run_soon_and_leaves_the_checkpoint_before(folder, prefix):
    config, run = config_at(folder / "full", prefix, train_iters=4000)
    code, text = run_with("on_a_full_disk", config, folder)
    assert code == 1 and "Traceback" not in text
    assert f"error: {run / 'global_step20'} cannot be written (" in text
    assert "checkpoints saved before are untouched" in text
    assert newest(run).step == 10 and 20 <= max(rows(run)) < 4000


def slow_save(self, state_dict, path):
    time.sleep(0.2)
    TorchCheckpointEngine.written(self, state_dict, path)


def train_slowly(groups, config, free):
    """Train with a slow disk; return what was printed."""
    TorchCheckpointEngine.written = TorchCheckpointEngine.save
    TorchCheckpointEngine.save = slow_save
    if free is not None:
        async_save.free_memory = lambda: free
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        Job(load_config([config], world_size=groups.world_size), groups).run()
    return printed.getvalue()


def test_there_is_one_save_at_a_time_and_the_last_is_complete_at_the_end(
    undisturbed, folder, prefix
):
    config, run = config_at(folder / "slow", prefix)
    [text] = run_ranks(1, train_slowly, config, None)
    lines = re.findall(r"  (saving|saved) \S+global_step(\d+)", text)
    expected = [(word, str(step)) for step in range(10, 70, 10) for word in ("saving", "saved")]
    assert lines == expected
    assert re.search(r"async_save: staging buffer of \d+\.\d\d GB on each rank", text)
    assert digest(run) == digest(undisturbed)


def test_without_memory_for_the_buffer_saving_is_synchronous(undisturbed, folder, prefix):
    config, run = config_at(folder / "small", prefix)
    [text] = run_ranks(1, train_slowly, config, 1000)
    assert text.count("do not fit into the 0.00 GB that are free on") == 1
    assert text.count("  saved ") == 6 and "  saving " not in text
    assert digest(run) == digest(undisturbed)


def fail_on_the_second_rank(groups, config):
    """Train; the second rank cannot write its part of the checkpoint after step 20."""
    write = TorchCheckpointEngine.save

    def save(self, state, path):
        if "step20" in path and groups.rank:
            raise OSError("no space left on device")
        write(self, state, path)

    TorchCheckpointEngine.save = save
    try:
        Job(load_config([config], world_size=2), groups).run()
    finally:
        if groups.rank:
            os._exit(1)  # as a failing rank ends, see `failure`


def test_a_checkpoint_is_published_only_when_all_ranks_have_written(folder, prefix):
    config, run = config_at(folder / "two", prefix, train_iters=4000)
    with pytest.raises(RuntimeError, match="rank 0"):
        run_ranks(2, fail_on_the_second_rank, config)
    assert newest(run).step == 10 and not (run / "global_step20").exists()
    assert max(rows(run)) < 4000
