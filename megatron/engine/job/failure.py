"""End all processes of a job when one rank fails, with one error message for each machine.

A rank that fails writes its error into the job's key-value store (torch.distributed's `Store`,
which torchrun or rank 0 serves) and ends. In every other process, a thread reads the store. When
the thread finds an error, it ends the process after GRACE seconds, even if the main thread is
inside a collective. Without this thread, a collective could wait half an hour for the failed rank,
and Python cannot interrupt a collective of NCCL. The thread also ends its process if another rank
sends no heartbeat (see `heartbeat`), or if the process's launcher was killed.

    key    value
    end    the first failure, {rank, host, text, code}
    main   the failure of rank 0, to compare with the errors of other ranks

If all ranks fail with the same error, only rank 0 prints the error. A rank that only lost the
connection to another rank prints nothing, because the other rank reports the cause.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypedDict

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  documented

from megatron import launcher
from megatron.ending import END_JOB, end_now, is_member
from megatron.engine.job.heartbeat import Hearing
from megatron.engine.job.store import connect
from megatron.files import write_text

GRACE = 5.0
"""A process that still runs this many seconds after a rank's failure ends itself."""
CAUSE_WAIT = 3.0
"""The seconds to wait until another rank's error is in the store. It must be less than GRACE."""
POLL_INTERVAL = 1.0
"""The seconds between two reads of the job's key-value store."""
OPEN_TIMEOUT = 1800.0
"""The time limit for rank 0 to open the store, in seconds."""
STORE_TIMEOUT = 60.0
"""A store that refuses connections for this many seconds counts as killed."""
SILENCE = 300.0
"""The default number of seconds without a sign of life after which a rank counts as lost."""
REPORT_TIMEOUT = 15.0
"""A failing process tries for this many seconds to reach the store."""
ORPHAN_TEXT = (
    "error: the launcher of this process (torchrun, mpirun or the deepspeed command) was killed, "
    "so this process ends too, without saving; checkpoints saved before are untouched"
)
LOST_TEXT = (
    "error: lost contact with another process of this job, which ended without a message: it was "
    "killed, or its machine ran out of memory or lost its network; see the system log there"
)
LOST_CONTACT = re.compile(
    "closed by peer|reset by peer|broken pipe|socket closed|connection was closed|remote process"
    "|failed to recv|failed to send|connection refused|no data available",
    re.IGNORECASE,
)
"""Matches the error texts of gloo, NCCL or the store that report the end of another process."""
# A context manager that ignores output errors, such as a full disk, in a process about to end.
_IF_WRITABLE = contextlib.suppress(OSError)


class Failure(TypedDict):
    """The error of a rank, as the other ranks read it from the job's key-value store."""

    # All other ranks end with the exit code `code`.

    rank: int
    host: str
    text: str
    code: int


# A lock that the first thread to end this process takes and never releases.
_ending = threading.Lock()
# The failure that this process's `Watch` read, kept because the store may be lost later.
_received: list[Failure] = []


class Watch:
    """A thread that ends this process when another rank fails.

    Create the watch before the process joins the job.

    Args:
        silence: The seconds without a heartbeat after which a rank counts as lost.
        exchange: A function of the job's key-value store. The thread calls the function regularly.
            The function returns whether the next call should follow sooner than usual.
    """

    # Every POLL_INTERVAL seconds, the thread looks for a failure in the job's key-value store
    # (torch.distributed's `Store`), so it also notices failures while joining.

    def __init__(
        self, silence: float = SILENCE, exchange: Callable[[Store], bool] = lambda store: False
    ) -> None:
        self._silence, self._exchange = silence, exchange
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Call this method after all ranks have reached the job's normal end."""
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        hearing = Hearing(self._silence, POLL_INTERVAL, self._listen) if is_member() else None
        until, orphaned = time.monotonic() + OPEN_TIMEOUT, False
        while not self._over.wait(POLL_INTERVAL):
            orphaned, was_orphaned = launcher.launcher_has_ended(), orphaned
            if orphaned and was_orphaned:  # a signal that ended the launcher would be here by now
                end_process(ORPHAN_TEXT)
            if hearing is None:
                continue
            hearing.tick()
            if _received:
                return self._end_soon()
            if text := hearing.lost():
                end_process(text)
            refused = hearing.refused_for > STORE_TIMEOUT
            if refused if hearing.answered else time.monotonic() > until:
                _received.append(_local_failure(LOST_TEXT))
                return self._end_soon()
        if hearing:
            hearing.stop()

    def _listen(self, store: Store) -> bool:
        """Look for a failure in the store; return whether to look again sooner than usual."""
        if not _received and store.check(["end"]):
            _received.append(json.loads(store.get("end")))
        return not _received and self._exchange(store)

    def _end_soon(self) -> None:
        """End this process after GRACE seconds, unless the process has ended by itself."""
        first = _received[0]
        if not (self._over.wait(GRACE) or _ending.locked()):
            _print(first) if first["rank"] == _rank() else print_if_elsewhere(first)
            end_now(first["code"])


def end_process(
    text: str, *, lost: bool = False, code: int = 1, ends_all: bool = False
) -> NoReturn:
    """Report an error to the other ranks and end this process. The other ranks then end, too.

    Args:
        text: The error message.
        lost: Whether the error is only a lost connection. Another process then reports the cause.
        code: The exit code of this process.
        ends_all: Whether the other ranks also exit with `code`. If false, they exit with 1.
    """
    _ending.acquire()
    failure = _local_failure(text, code if ends_all else 1)
    if not lost and (code != 2 or _rank() == 0):  # 2: the configuration, of which all ranks say so
        _write_for_launcher(text)
    causes: list[Failure] = []
    report = threading.Thread(target=_report, args=(failure, lost, causes), daemon=True)
    report.start()
    report.join(REPORT_TIMEOUT)
    code = causes[0]["code"] if causes else code
    if report.is_alive():  # the store does not answer
        _print(failure)
    if sys.stdout:
        with _IF_WRITABLE:
            sys.stdout.flush()
    end_now(code)


END_JOB[:] = [end_process]


def lost_contact(error: BaseException | None) -> bool:
    """Return whether `error` means that another process has ended."""
    # An error that caused `error` counts, too, unless `from None` hides it.
    while error is not None:
        is_torchs = type(error) is RuntimeError or isinstance(error, dist.DistBackendError)
        is_loss = is_torchs and LOST_CONTACT.search(str(error))
        if is_loss or isinstance(error, dist.DistNetworkError):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _report(failure: Failure, lost: bool, causes: list[Failure]) -> None:
    """Report `failure` to the other ranks, or print it if the job has no key-value store.

    Args:
        lost: Whether the failure is only a lost connection to another process.
        causes: A list to which the failure of another rank is added if it caused `failure`.
    """
    try:
        # A store that was killed with its launcher may accept a last connection and never answer.
        if is_member() and not (launcher.launcher_has_store() and launcher.launcher_has_ended()):
            cause = _report_to_store(failure, lost)
            causes += [cause] if cause else []
            return
    except (OSError, RuntimeError):
        pass  # there is no store, so no other rank prints the error
    _print(failure)


def _report_to_store(failure: Failure, lost: bool) -> Failure | None:
    """Write `failure` into the job's key-value store, and print it.

    If `lost` is true and another rank has reported the cause, `failure` is neither written nor
    printed. If another rank prints the same error, `failure` is not printed again.

    Args:
        lost: Whether the failure is only a lost connection to another process.

    Returns:
        The failure of another rank that caused `failure`; None if no cause is known.
    """
    if lost and _received and _received[0]["rank"] != failure["rank"]:
        print_if_elsewhere(_received[0])
        return _received[0]
    is_main = failure["rank"] == 0
    opens = is_main and not (dist.is_initialized() or launcher.launcher_has_store())
    store = connect(0 if launcher.launcher_has_ended() else CAUSE_WAIT, opens)
    if lost and (first := _wait_for(store, "end")):
        print_if_elsewhere(first)
        return first
    if is_main and not lost:
        store.set("main", json.dumps(failure))
    written: Failure = json.loads(store.compare_set("end", "", json.dumps(failure)))
    others = [written] if is_main else [written, _wait_for(store, "main") or written]
    same = [each for each in others if each["text"] == failure["text"] and each != failure]
    if same and (lost or not is_main):
        print_if_elsewhere(same[-1])
    else:
        _print(failure)
    if is_main:  # rank 0 may hold the store, which the other ranks still have to read
        time.sleep(CAUSE_WAIT if opens else 1.5 * POLL_INTERVAL)
    return None


def _write_for_launcher(text: str) -> None:
    """Write the error message `text` into torchrun's error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    when = {"py_callstack": text, "timestamp": str(int(time.time()))}
    if path:
        with _IF_WRITABLE:
            write_text(Path(path), json.dumps({"message": {"message": text, "extraInfo": when}}))


def _wait_for(store: Store, key: str) -> Failure | None:
    """Return the failure stored at `key`, or None if there is none after CAUSE_WAIT seconds."""
    until = time.monotonic() + CAUSE_WAIT
    while not store.check([key]):  # torch's `wait` would print a warning
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
    return json.loads(store.get(key))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _local_failure(text: str, code: int = 1) -> Failure:
    return {"rank": _rank(), "host": socket.gethostname(), "text": text, "code": code}


def _print(failure: Failure) -> None:
    """Print `failure` on the real stderr."""
    # The main thread may have redirected `sys.stderr` to hide output.
    with _IF_WRITABLE:
        source = f"rank {failure['rank']} on {failure['host']}"
        print(f"{source}: {failure['text']}", file=sys.__stderr__, flush=True)


def print_if_elsewhere(failure: Failure) -> None:
    """If `failure` happened on another machine, print `failure` on one rank of this machine."""
    if failure["host"] != socket.gethostname() and launcher.local_rank() == 0:
        _print(failure)
