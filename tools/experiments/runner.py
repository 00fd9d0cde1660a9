"""Run the cells (training runs) of a grid, several at a time.

Each cell has its own process and its own log. A signal to `tools/sweep.py` is passed on to the
cells, which save a checkpoint and end. The next sweep resumes these cells. If a cell fails, the end
of its log is printed, and the other cells continue.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import IO, Any

from megatron.cpu_settings import waiting_of_children
from megatron.errors import USER_ERRORS
from megatron.files import without_waiting
from megatron.readable_numbers import clock
from megatron.run_folder import RunFolder
from megatron.shipped import ROOT
from tools.experiments.grid import Cell
from tools.experiments.state import Record, is_complete, share_done, state_of

_TAIL, _TAIL_BYTES = 12, 1 << 16  # the last lines of the log of a failed cell that are shown
_REPORT_SECONDS = 60.0
_POLL_SECONDS = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class _Running:
    cell: Cell
    process: Any  # as Popen
    record: Record
    device: str
    begun: float
    before: float  # the share of its steps that earlier processes took
    lease: ExitStack  # holds the run folder until the cell's process takes it over


def start(command: Sequence[str], log: IO[bytes], environ: dict[str, str]) -> Any:
    """Start a process in its own session, so that Ctrl-C in the terminal does not end it.

    Args:
        command: The command with its arguments.
        log: The file to which the process writes its output.
        environ: The environment variables of the process.
    """
    return Popen(
        command, stdin=DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
    )


def command_of(cell: Cell) -> list[str]:
    """Return the command that trains and evaluates a cell (one run of a grid)."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.processes}"]
    options = [text for override in cell.overrides for text in ("-o", override)]
    launcher = ranks if cell.processes > 1 else []
    return [sys.executable, *launcher, str(ROOT / "train.py"), *cell.configs, *options]


def _move_away(folder: Path) -> Path:
    """Rename a run folder to the first free name FOLDER.stale-N, and return the new path."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.stale-{number}")).exists():
        number += 1
    moved = folder.rename(target)
    for lease in moved.glob(".lease-*"):  # which `sole_writer` would look for in the old place
        lease.unlink()
    return moved


class Runner:
    """Runs the training runs of a grid, several at a time.

    Args:
        devices: One value of CUDA_VISIBLE_DEVICES for each run that may be active at the same time.
            The value "" leaves the variable unchanged.
        say: A function that prints a line.
        changed: A function that is called after a run has started or ended.

    Attributes:
        failed: The runs that failed.
        left: The runs that were left to another job, because that job writes their folders.
        rerun: Whether the folder of a stale run is moved away, so that the run starts again.
        signals: The number of received signals. After the first signal, the runs save and end.
            After the second signal, they are killed.
    """

    def __init__(
        self, devices: Sequence[str], say: Callable[[str], None], changed: Callable[[], object]
    ):
        self._free, self._say, self._changed = deque(devices), say, changed
        self.rerun = False
        self._most = len(devices)
        self._running: list[_Running] = []
        self.failed: list[Cell] = []
        self.left: list[Cell] = []
        self.signals = 0

    def receive(self, *_: object) -> None:
        """Receive a signal: at the first, let all runs save and end; at the second, kill them."""
        self.signals += 1
        for each in self._running:
            if self.signals > 1:
                each.process.kill()
            else:
                each.process.send_signal(signal.SIGTERM)

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells (training runs) until all of them have ended.

        After a signal, no further cells are started, and the method returns when the running cells
        have ended.
        """
        waiting, begun, reported = deque(cells), time.monotonic(), time.monotonic()
        self._total, self._work, self._ended = len(cells), float(len(cells)), 0.0
        self._most = min(self._most, len(cells))
        try:
            while (waiting and not self.signals) or self._running:
                while waiting and self._free and not self.signals:
                    self._start(waiting.popleft())
                ended = [each for each in self._running if each.process.poll() is not None]
                for each in ended:
                    self._end(each)
                if ended or time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    self._say(self._progress(begun, len(waiting)))
                time.sleep(_POLL_SECONDS)
        finally:
            for each in self._running:  # after an error of the sweep itself, such as a full disk
                each.process.send_signal(signal.SIGTERM)
                each.lease.close()

    def _start(self, cell: Cell) -> None:
        # A sweep imports the engine only when it starts a run: the import takes seconds.
        from megatron.engine.errors import CheckpointError
        from megatron.engine.job.lease import handed, sole_writer

        with ExitStack() as lease:
            self._work -= 1
            try:
                record = Record.of(cell)
                if self.rerun and state_of(cell)[0] == "stale":
                    with sole_writer(cell.folder):
                        self._say(f"{cell.name}: old run moved to {_move_away(cell.folder)}")
                lease.enter_context(sole_writer(cell.folder))
                if state_of(cell)[0] == "finished":
                    self._say(f"{cell.name}: another job has finished it")
                    return
                self._launch(cell, record, handed(cell.folder), lease)
                self._work += 1 - self._running[-1].before
            except CheckpointError as error:
                self._leave(cell, str(error))
            except USER_ERRORS as error:
                self._fail(cell, str(error))
        self._changed()

    def _launch(self, cell: Cell, record: Record, given: dict[str, str], lease: ExitStack) -> None:
        """Start the process of one run of a grid.

        Args:
            cell: The run.
            record: The record of the run's inputs, which is written to the run folder.
            given: Environment variables for the process.
            lease: The exit stack that releases the run folder.
        """
        # The record is the content of the new `cell.json`. The callbacks of `lease` are moved to
        # the entry in the list of running cells. Runs that share the cores also share the threads:
        # two runs with one thread per core each were 1.6 times slower than with one thread each.
        import torch

        if earlier := Record.read(cell.folder):
            record.seconds = earlier.seconds
        record.write(cell.folder)
        for path in RunFolder(cell.folder).results:  # of an evaluation with other keys
            path.unlink(missing_ok=True)
        device, before = self._free[0], share_done(cell)
        threads = max(1, torch.get_num_threads() // (self._most * cell.processes))
        environ = {"OMP_NUM_THREADS": str(threads)} | os.environ
        environ |= {"CUDA_VISIBLE_DEVICES": device} if device else {}
        environ |= waiting_of_children(self._most) | given
        with open(RunFolder(cell.folder).log, "ab", opener=without_waiting) as log:
            process = start(command_of(cell), log, environ)
        self._free.popleft()
        each = _Running(cell, process, record, device, time.monotonic(), before, lease.pop_all())
        self._running.append(each)
        if self.signals:  # it came before the list had this cell
            process.send_signal(signal.SIGTERM)
        self._say(f"{cell.name}: {'resumes' if before else 'starts'}, log in {log.name}")

    def _end(self, each: _Running) -> None:
        from megatron.engine.errors import CheckpointError
        from megatron.engine.job.lease import sole_writer

        cell = each.cell
        self._running.remove(each)
        self._free.append(each.device)
        self._ended += 1 - each.before
        each.lease.close()  # if the process ended before it took the lease over
        try:
            with sole_writer(cell.folder):
                self._judge(each)
        except CheckpointError as error:
            self._leave(cell, str(error))
        self._changed()

    def _judge(self, each: _Running) -> None:
        """Decide how the process of a run ended, print it, and write it into the run's record."""
        cell, record = each.cell, each.record
        record.seconds += time.monotonic() - each.begun
        code = each.process.returncode
        if code == 0 and is_complete(cell.folder, record):
            record.state = "finished"
            self._say(f"{cell.name}: finished after {clock(record.seconds)}")
        elif code == 0 or self.signals:
            record.state = "cut off"
            self._say(f"{cell.name}: cut off; the next sweep resumes it")
        else:
            record.state = "failed"
            log = RunFolder(cell.folder).log
            with open(log, "rb", opener=without_waiting) as file:
                file.seek(-min(_TAIL_BYTES, log.stat().st_size), os.SEEK_END)
                lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL:]
            self._fail(cell, "\n  ".join([f"exit code {code}; the end of {log}:", *lines]))
        record.write(cell.folder)

    def _leave(self, cell: Cell, why: str) -> None:
        self.left.append(cell)
        self._say(f"{cell.name}: left to another job: {why}")

    def _fail(self, cell: Cell, why: str) -> None:
        self.failed.append(cell)
        self._say(f"{cell.name}: FAILED: {why}")

    def _progress(self, begun: float, waiting: int) -> str:
        """Return a line with the number of ended runs and an estimate of the remaining time.

        Args:
            begun: The start time of the sweep, from `time.monotonic`.
            waiting: The number of runs that have not started.
        """
        done = self._ended + sum(share_done(each.cell) - each.before for each in self._running)
        passed = time.monotonic() - begun
        left = clock(passed * max(0.0, self._work - done) / done) if done > 0 else "unknown"
        ended = self._total - waiting - len(self._running)
        return (
            f"{ended} of {self._total} cells ended, {len(self._running)} running, time left: {left}"
        )
