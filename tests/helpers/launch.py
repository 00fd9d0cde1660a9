"""Run a function on several gloo processes, or a command of the project.

All these processes are forked from a server process that has already imported DeepSpeed. With
FORKED_RANKS in its environment, the ranks of a torchrun that is started here are, too. A fork hides
missing imports, variables that are read at import, Python's import path and how an interpreter
ends: `tests/test_command_lines.py` and `tests/test_entry.py` start new interpreters, and
`tests/engine/test_jobs.py` starts torchrun with new ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing import subprocess_handler
from torch.distributed.elastic.multiprocessing.subprocess_handler import handlers

from megatron import pictures
from megatron.engine.job import join
from megatron.evaluation import length_report
from megatron.launcher import PORTS
from tests.helpers.paths import ROOT

PRELOADED = [
    "megatron.pretraining.run",
    "megatron.evaluation.by_length",
    "torch._dynamo",  # ZeRO-3 and torch.compile import it
    "deepspeed.module_inject.auto_ep_layer",  # DeepSpeed imports it when it builds an engine
    "pytest",
    "hypothesis.strategies",
    "tests.helpers.jobs",  # imports pandas
    "matplotlib.backends.backend_agg",  # for the pictures of `evaluate.py`, as the next
    "scipy.stats",
    "tests.pretraining.known_packages",
]
"""Imported once, by the server from which all ranks are forked. This saves seconds for each
rank."""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for scripts; tests have it of tests/conftest.py


def free_port() -> int:
    """Return a port that no program listens on, for the store of a job that starts later.

    Linux assigns none of `PORTS` itself, so none is taken meanwhile by one of the many connections
    of tests that run at the same time.
    """
    while True:
        port = secrets.choice(PORTS)  # not of `random`, which has the same seed in each process
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 560
) -> list[Any]:
    """Run `function(groups, *args)` on each rank, and return the results in the order of ranks.

    `function` must be importable.

    Args:
        timeout: The time limit in seconds for the first rank to finish.

    Raises:
        RuntimeError: A rank failed; its traceback is in the text.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    outcome: dict[int, Any] = {}
    try:
        while len(outcome) < world_size:
            rank, error, value = results.get(timeout=timeout)
            if error:
                raise RuntimeError(f"rank {rank}:\n{error}")
            outcome[rank] = pickle.loads(value)
    finally:
        for process in processes:
            if len(outcome) < world_size:
                process.kill()
            process.join()
    return [outcome[rank] for rank in range(world_size)]


def _rank(rank, world_size, port, results, function, args):
    gc.freeze()  # or DeepSpeed's many collections would look at all that the server has imported
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCH_GLOO_LAZY_INIT="1",  # a tenth less time: few of the many groups are ever used
    )
    # Drawing takes a third of such a short run; tests/evaluation tests the pictures.
    length_report.kernels_figure = length_report.extrapolation_figure = mock.Mock()
    pictures.save = lambda figure, path: path.write_bytes(b"")
    try:
        groups = join.join_job()
        value = function(groups, *args)
        groups.barrier()
        results.put((rank, None, pickle.dumps(value)))
        join.leave_job()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def run_script(
    script: Path, *args: object, cwd: Path, environ: dict[str, str], only: str = ""
) -> tuple[int, str]:
    """Run `python script args...` in a forked process, without the seconds that its imports take.

    Args:
        only: "stdout" or "stderr" returns this stream alone.

    Returns:
        The exit code, and stdout and stderr together, without the times of the log's lines.
    """
    with (
        os.fdopen(os.memfd_create("output"), "r+", errors="replace") as output,
        open(os.devnull, "w") as nowhere,
    ):
        argv, kept, lost = [str(script), *map(str, args)], output.fileno(), nowhere.fileno()
        out, errors = (lost if only == other else kept for other in ("stderr", "stdout"))
        process = start_script(argv, out, errors=errors, cwd=cwd, environ=environ)
        process.join(240)
        code = process.exitcode
        process.kill()  # does nothing if it has ended
        process.join()
        output.seek(0)
        text = output.read()
    assert code is not None, f"not ended after 240 s: {text}"
    return code, untimed(text)


def untimed(text: str) -> str:
    """Remove the time that the lines of a log have in a file."""
    return re.sub(r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ", "", text)


def start_script(
    argv: list[str],
    output: int,
    *,
    cwd: Path,
    environ: dict[str, str],
    errors: int | None = None,
    own_group: bool = False,
) -> Any:
    """Start `python argv...` as `run_script` does.

    Args:
        output: The file descriptor to which it prints.
        errors: Another file descriptor for stderr.
        own_group: Whether the process gets a process group of its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    inherited = [reduction.DupFd(each) for each in (output, output if errors is None else errors)]
    process = context.Process(target=_script, args=(argv, cwd, environ, own_group, *inherited))
    process.start()
    return process


class Forked:
    """A cell of a sweep, for `runner.start`: a process that is forked, used like a Popen.

    It skips the seconds that the imports of a new process take.
    """

    def __init__(self, command: list[str], log: IO[bytes], environ: dict[str, str]):
        self.process = self.start(command[1:], log.fileno(), environ)

    def start(self, argv: list[str], output: int, environ: dict[str, str]) -> Any:
        return start_script(argv, output, cwd=Path.cwd(), environ=environ)

    returncode = property(lambda self: self.process.exitcode)

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()


def call(script: str, *args: object, code: int = 0) -> str:
    """Run a command of the project with `run_script`; return its output."""
    found, text = run_script(ROOT / script, *args, cwd=ROOT, environ=dict(os.environ))
    assert found == code, text
    return text


class ForkedRank(Forked):
    """A rank of torchrun, used like a Popen: `python -u SCRIPT arguments...` in an own group.

    Its process is added to the file `PID` in the folder FORKED_RANKS. PID is torchrun's process.
    """

    def __init__(self, command: tuple[str, ...], environ: dict[str, str]):
        self.process = start_script(
            [*command[2:]], 1, errors=2, cwd=Path.cwd(), environ=environ, own_group=True
        )
        multiprocessing.process._children.discard(self.process)  # torchrun does not wait at its end
        self.pid = self.process.pid
        with suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)
        with Path(environ["FORKED_RANKS"], str(os.getpid())).open("a") as file:
            print(self.pid, file=file)

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self.poll()


class ForkingHandler(subprocess_handler.SubprocessHandler):
    """torchrun's handler of a rank, which forks it from the server of torchrun's process."""

    _popen = staticmethod(ForkedRank)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        # A rank that ends between two lines of torchrun is gone. A child would stay until `poll`.
        with suppress(ProcessLookupError):
            super().close(death_sig)


def _script(argv, cwd, environ, own_group, output, errors):
    gc.freeze()
    os.chdir(cwd)
    if own_group:
        os.setpgid(0, 0)
    if "FORKED_RANKS" in environ:
        forkserver._forkserver.ensure_running = lambda: None  # it runs: this process is its child
        handlers.SubprocessHandler = ForkingHandler
    run_here(argv, environ, output.detach(), errors.detach())


def run_here(argv: list[str], environ: dict[str, str], output: int, errors: int) -> None:
    """Run `python argv...` in this process; it prints to two file descriptors."""
    os.environ.clear()
    os.environ.update(environ)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
