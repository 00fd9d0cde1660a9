"""End a job early and in good order: after SIGTERM, SIGUSR1 or Ctrl-C, or after a time limit.

In this module, the ranks "leave" when the whole job ends early. If training is not finished, the
ranks first save a checkpoint.

Before training starts, a signal ends the process at once, because there is nothing to save. Once
training has started, a signal is only recorded, and all ranks leave at the same safe point. Safe
points are after an optimizer step and between two batches of an evaluation. A signal therefore
interrupts neither a step nor a checkpoint.

Python runs a signal's handler in the main thread, which may be inside a collective for minutes. The
handlers therefore do nothing. Instead, a thread reads the signals from a pipe, to which Python
writes the number of each signal (`signal.set_wakeup_fd`).

Every rank counts the safe points that it passes, and a safe point has the same number on all ranks.
The ranks agree on the number of the safe point at which they leave, through the job's key-value
store (torch.distributed's `Store`). Each rank's `failure.Watch` polls the store anyway, so a step
without a signal costs no communication.

    key       value
    leave     the reason to leave, from the first rank that got a signal or passed the time limit
    at/RANK   the number of the safe point that this rank reaches next
    until     the largest of the numbers `at/RANK`; all ranks leave at this safe point

A rank that has written `at/RANK` waits at that safe point until it can read `until`. No rank can
therefore pass the safe point at which all ranks leave.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from megatron import ending, launcher
from megatron.entry import INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IMPATIENT = 3
"""If Ctrl-C is pressed this many times, the process ends at once, without saving first."""


class Leave(Exception):
    """The exception that ends the job early.

    Every rank raises it at the same safe point: after an optimizer step, or between two batches of
    an evaluation.
    """


class Preemption:
    """Ends the job early after a signal or a time limit. Each rank has one such object.

    Args:
        exit_code: The exit code of this process if the job ends early.
        minutes: The number of minutes from now after which the job ends early even without a
            signal. None sets no limit.

    Attributes:
        exit_code: The exit code of this process if the job ends early.
        decided: An event that is set when this rank knows the safe point at which all ranks end the
            job.
        why: The reason to end the job early, or "" if there is none.
        left: Whether this rank has reached the safe point at which the job ends early.
    """

    # The place is an optimizer step or an evaluation batch. Without `listen`, no signal is handled.

    def __init__(self, exit_code: int = 0, minutes: float | None = None):
        self.exit_code, self._minutes = exit_code, minutes
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self.decided = threading.Event()
        self._trains = False
        self._passed = 0
        self._interrupts = 0
        self._announced = False
        self._at: int | None = None
        self._until = 0
        self.why = ""
        self.left = False

    def listen(self) -> None:
        """Handle SIGTERM, SIGUSR1 and Ctrl-C from now on. Only the main thread may call this."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()

    def begin(self) -> None:
        """Declare that training begins. From now on, a signal takes effect only at a safe point."""
        # Later signals take effect only at a safe point.
        self._trains = True

    def ask(self, why: str) -> None:
        """Ask all ranks to end the job at one of the next safe points.

        Args:
            why: The reason.
        """
        # The job ends at one of the next safe points.
        with self._lock:
            self.why = self.why or why
            if _ranks() == 1 and self._at is None:
                self._at = self._until = self._passed + 1
                self.decided.set()

    def due(self) -> bool:
        """Return whether all ranks end the job at this safe point.

        Every rank must call this method at each safe point. Safe points are after an optimizer step
        and between two batches of an evaluation.
        """
        if self._minutes is not None and time.monotonic() - self._begin > 60 * self._minutes:
            self.ask(f"exit_duration_in_mins {self._minutes:g}")
        with self._lock:
            self._passed += 1
            asked = self._at is not None
        if not asked:
            return False
        self.decided.wait()
        self.left = self._passed >= self._until
        return self.left

    def exchange(self, store: Any) -> bool:
        """Exchange messages with the other ranks, to agree on the safe point at which the job ends.

        Each call does the next step of the agreement, without waiting.

        Args:
            store: The job's key-value store, a `torch.distributed.Store`.

        Returns:
            Whether the agreement has begun but is not complete. If so, call the method again soon.
        """
        # The rank's `failure.Watch` calls this method at each poll of the store.
        if self.why and not self._announced:
            where = f"{self.why} at rank {os.environ['RANK']} on {socket.gethostname()}"
            store.compare_set("leave", "", json.dumps(where))
            self._announced = True
        if self.decided.is_set() or not store.check(["leave"]):
            return False
        if self._at is None:
            self.why = json.loads(store.get("leave"))
            self._announced = True
            with self._lock:
                self._at = self._passed + 1
            store.set(f"at/{os.environ['RANK']}", str(self._at))
        keys = [f"at/{rank}" for rank in range(_ranks())]
        if os.environ["RANK"] == "0" and store.check(keys):
            store.set("until", str(max(int(store.get(key)) for key in keys)))
        if store.check(["until"]):
            self._until = int(store.get("until"))
            self.decided.set()
            if os.environ["RANK"] == "0":
                _say(f"{self.why}: leaving after this step")
        return True

    def finish(self) -> int:
        """Ignore SIGTERM, SIGUSR1 and Ctrl-C from now on, and return this process's exit code."""
        # Python resets its signal handlers while it exits. A signal would then end the process with
        # a wrong exit code, although everything is saved.
        for number in SIGNALS:
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_IGN)
        return self.exit_code if self.left else 0

    def _read(self, reader: int) -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number in SIGNALS:
                self._receive(signal.Signals(number))

    def _receive(self, sent: signal.Signals) -> None:
        self._interrupts += sent is signal.SIGINT
        name = "Ctrl-C" if sent is signal.SIGINT else sent.name
        if self._interrupts >= IMPATIENT:
            _say(f"{name} for the {IMPATIENT}rd time: ending at once, nothing more is saved")
            ending.end_now(INTERRUPTED)
        if not self._trains:
            text = f"{name} before the first step: there is nothing to save"
            ending.end_job_of_this_process(text, code=self.exit_code, ends_all=True)
            _say(text)
            ending.end_now(self.exit_code)
        # This process may continue to its last safe point even if its launcher ends, unless the
        # launcher holds the key-value store, through which several ranks agree on a safe point.
        if _ranks() == 1 or not launcher.launcher_has_store():
            launcher.outlive_launcher()
        if self.why and os.environ.get("RANK", "0") == "0":
            _say(f"{name}: leaving already, a checkpoint is written first")
        elif _ranks() == 1:  # several ranks say so when all have agreed; a dead one never does
            _say(f"{name}: leaving after this step")
        self.ask(name)


current = Preemption()
"""The object of this process. `listen` replaces it."""


def listen(exit_code: int, minutes: float | None) -> None:
    """Handle SIGTERM, SIGUSR1 and Ctrl-C for the rest of this process.

    Args:
        exit_code: The exit code of this process if the job ends early.
        minutes: The number of minutes from now after which the job ends early even without a
            signal. None sets no limit.
    """
    global current
    current = Preemption(exit_code, minutes)
    current.listen()


def safe_point() -> None:
    """Raise `Leave` if the ranks have agreed to end the job at this safe point.

    Every rank must call this function after each optimizer step, and between two batches of an
    evaluation.
    """
    if current.due():
        raise Leave


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _nothing(_number: int, _frame: Any) -> None:
    """Handle a signal by doing nothing."""
    # A thread reads the signal from a pipe instead. Python writes a signal to the pipe
    # (`signal.set_wakeup_fd`) only if the signal has a handler.


def _say(text: str) -> None:
    """Print `text` to the original stderr of the process, even if `sys.stderr` is redirected."""
    # The main thread may have redirected `sys.stderr` to hide output.
    with contextlib.suppress(OSError):  # nobody reads, or the disk is full
        print(text, file=sys.__stderr__, flush=True)
