"""Run a command of the project in this process, after strace has been attached to it.

Unique names are numbered from 1, so that two runs of a command use the same paths. The cell of a
sweep is forked from this process. strace follows it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import runpy
import signal
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron import ending, files
from tests.helpers.launch import Forked, run_here


class Cell(Forked):
    """A cell that is forked from this process, as strace has to follow it.

    The names of its temporary files have the id of this process, which is known before the run.
    """

    def start(self, argv: list[str], output: int, environ: dict[str, str]) -> Any:
        process = multiprocessing.get_context("fork").Process(
            target=run_cell, args=(argv, output, environ, os.getpid())
        )
        process.start()
        return process


def run_cell(argv: list[str], output: int, environ: dict[str, str], named: int) -> None:
    """Run a cell in this process, without what the sweep has put into it."""
    from tools.experiments import runner

    os.setsid()
    for number in runner.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    ending.GIVE_BACK.clear()
    files.os = SimpleNamespace(**vars(os) | {"getpid": lambda: named})
    run_here(argv, environ, output, output)


def wait_for_tracer() -> None:
    """Return when a tracer is attached to this process."""
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.005)
    time.sleep(0.02)


if __name__ == "__main__":
    numbers = itertools.count(1)
    uuid.uuid4 = lambda: uuid.UUID(int=next(numbers))
    sys.argv = sys.argv[1:]
    if os.environ.pop("TRACED", ""):
        wait_for_tracer()
    if Path(sys.argv[0]).name == "prepare_data.py":
        from megatron.data.prepare import chunks

        chunks.CHUNK_BYTES = 1 << 13  # a short text then has several chunks
    if Path(sys.argv[0]).name == "sweep.py":
        from tools.experiments import runner

        runner.start = Cell
    runpy.run_path(sys.argv[0], run_name="__main__")
