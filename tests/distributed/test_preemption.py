"""A job that is told to leave saves, exits, and goes on as if nothing had been.

Real signals reach real processes at chosen moments. The same command, started again and again, ends
with the weights and the metrics of an undisturbed run, bit for bit.
"""

import os
import runpy
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron import launcher, preemption
from megatron.data.samples.loader import TrainLoader
from megatron.engine.checkpoint import relayout, write
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.job import failure
from megatron.engine.job_data import JobData
from megatron.engine.training import pipeline_engine
from tests.helpers.jobs import all_but_speed, digest, write_config, write_shards
from tests.helpers.loose import run
from tests.helpers.paths import ROOT

CODE = 85
KEYS = {
    "gradient_accumulation_steps": 2,
    "train_iters": 14,
    "log_interval": 5,
    "eval_interval": 4,
    "eval_iters": 3,
    "save_interval": 6,
    "hidden_dropout": 0.1,
    "preemption_exit_code": CODE,
}
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
MOMENTS = {
    "accumulation": (TrainLoader, "__next__"),
    "save": (write, "describe_files"),
    "evaluation": (pipeline_engine, "next_batches"),
    "conversion": (relayout.ds_to_universal, "main"),
    "loading": (JobData, "training"),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("text"))


class Agreement(preemption.Preemption):
    """Keeps the last object in `last`, to wait for."""

    last: preemption.Preemption

    def listen(self):
        Agreement.last = self
        super().listen()


def wait_until_ended_or_agreed():
    """Wait until this process ends, or until all ranks have agreed where to leave."""
    assert Agreement.last.decided.wait(60), "nobody leaves"


def job(rank, config, fault=None, options=(), poll=0.02):
    """Run `train.py`; `fault` is (moment, the how-manieth, ranks, signals)."""
    failure.POLL_INTERVAL, preemption.Preemption = poll, Agreement
    if fault and rank in fault[2]:
        owner, name = MOMENTS[fault[0]]
        original, calls = getattr(owner, name), []

        def interrupted(*args, **kwargs):
            calls.append(1)
            if len(calls) == fault[1]:
                for number in fault[3]:
                    os.kill(os.getpid(), number)
                if fault[3].count(INT) < preemption.IMPATIENT:
                    wait_until_ended_or_agreed()
                else:
                    time.sleep(60)
            return original(*args, **kwargs)

        setattr(owner, name, interrupted)
    sys.argv = ["train.py", str(config), *options]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def config_at(folder, prefix, ranks, **changes):
    keys = KEYS | {"train_micro_batch_size_per_gpu": 4 // ranks} | changes
    save = str(folder / "run")
    return write_config(folder / "c.yml", prefix, save=save, load=save, **keys), folder / "run"


CHAINS = {
    1: [
        (("loading", 1, [0], [TERM]), 0, "SIGTERM before the first step: there is nothing to save"),
        (("accumulation", 6, [0], [TERM]), 3, "SIGTERM: left after step 3; run the same command"),
        (("evaluation", 1, [0], [USR1]), 4, "SIGUSR1: left after step 4"),
        (("save", 1, [0], [INT, INT]), 7, "Ctrl-C: left after step 7"),
        (("evaluation", 3, [0], [INT]), 14, "Ctrl-C: left after step 14"),
    ],
    2: [
        (("loading", 1, [1], [TERM]), 0, "rank 1 on HOST: SIGTERM before the first step"),
        (("accumulation", 6, [1], [TERM]), 3, "SIGTERM at rank 1 on HOST: left after step"),
        (("evaluation", 1, [0], [USR1]), 4, "SIGUSR1 at rank 0 on HOST: left after step"),
        (("save", 1, [0, 1], [INT, INT]), 7, "left after step"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ranks", CHAINS)
def test_told_to_leave_at_every_moment_it_ends_as_if_nothing_had_been(tmp_path, prefix, ranks):
    alone, undisturbed = config_at(tmp_path / "alone", prefix, ranks)
    assert run(job, alone, ranks=ranks)[0] == [0] * ranks
    config, folder = config_at(tmp_path / "told", prefix, ranks)
    for fault, step, says in CHAINS[ranks]:
        codes, texts, _ = run(job, config, fault, ranks=ranks)
        everything = "\n".join(texts)
        assert codes == [CODE] * ranks, everything
        assert says.replace("HOST", os.uname().nodename) in everything
        assert "Traceback" not in everything and everything.count("left after") <= 1
        assert not list(folder.glob(".lease-*"))
        saved = newest(folder)
        reached = saved.record.progress.step if saved else 0
        assert reached == step if ranks == 1 else step <= reached < 14, everything
    codes, texts, _ = run(job, config, ranks=ranks)
    assert codes == [0] * ranks, texts
    assert digest(folder) == digest(undisturbed)
    assert all_but_speed(folder) == all_but_speed(undisturbed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_leaving_a_conversion_leaves_the_checkpoint_as_it_was(tmp_path, prefix, ranks):
    config, folder = config_at(tmp_path, prefix, ranks, train_iters=3, eval_iters=0)
    assert run(job, config, ranks=ranks)[0] == [0] * ranks
    before = digest(folder)
    other = ["-o", "zero_optimization.stage=2", "-o", "train_iters=4"]
    fault = ("conversion", 1, [0], [USR1])
    codes, [text, *_], _ = run(job, config, fault, other, ranks=ranks)
    says = "SIGUSR1 before the first step: there is nothing to save\n"
    assert codes == [CODE] * ranks and text.endswith(says)
    assert digest(folder) == before
    codes, [text, *_], _ = run(job, config, None, other, ranks=ranks)
    assert codes == [0] * ranks and "converted in" in text and (folder / "global_step4").is_dir()


def told_with_its_shell(rank, config):
    """Send SIGTERM to a rank in a save, and to the shell between the rank and its launcher."""
    shell = subprocess.Popen(["sleep", "60"])
    launcher._parents = lambda _mark: [psutil.Process(shell.pid)]
    written = write.describe_files

    def told(*args):
        shell.terminate()
        shell.wait()
        os.kill(os.getpid(), TERM)
        time.sleep(1.2)  # longer than two polls, after which it would end
        wait_until_ended_or_agreed()
        return written(*args)

    write.describe_files = told
    job(rank, config, poll=0.5)  # two polls are the time until the signal must have arrived


def test_a_signal_that_ends_the_shell_around_a_rank_too_does_not_end_the_save(tmp_path, prefix):
    config, folder = config_at(tmp_path, prefix, 2, eval_iters=0)
    codes, texts, _ = run(told_with_its_shell, config)
    assert codes == [CODE] * 2, texts
    assert newest(folder) and "left after step" in "".join(texts)


def test_it_leaves_when_its_time_is_over_and_says_that_nothing_is_saved(tmp_path, prefix):
    config, folder = config_at(tmp_path, prefix, 1, exit_duration_in_mins=1e-6)
    codes, [text], _ = run(job, config, None, ["-o", "save=null", "-o", "load=null"], ranks=1)
    assert codes == [CODE] and not folder.exists()
    assert "exit_duration_in_mins 1e-06: left after step 1; nothing is saved, because" in text


def test_the_third_ctrl_c_ends_at_once_and_the_checkpoint_before_is_usable(tmp_path, prefix):
    config, folder = config_at(tmp_path, prefix, 1, save_interval=2, eval_iters=0)
    codes, [text], _ = run(job, config, ("save", 2, [0], [INT, INT, INT]), ranks=1)
    assert codes == [130] and "Ctrl-C for the 3rd time: ending at once" in text
    saved = newest(folder)
    assert saved and saved.tag == "global_step2"
    assert run(job, config, ranks=1)[0] == [0]


LATE = """
import os, runpy, signal, sys, types
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
sys.modules["late"] = types.ModuleType("late")
sys.modules["late"].late = Late()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs `train.py`, and sends SIGTERM while Python deletes its modules, after all else has ended."""


def test_a_signal_while_python_exits_does_not_change_the_exit_code(tmp_path, prefix):
    config, _ = config_at(tmp_path, prefix, 1, exit_duration_in_mins=1e-6)
    command = [sys.executable, "-c", LATE, str(ROOT / "train.py"), str(config)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == CODE and "left after step 1" in ended.stdout, ended
