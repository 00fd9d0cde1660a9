"""End all processes of a job when one rank fails, with one error message for each machine.

A rank that fails writes its error into the job's key-value store (torch.distributed's `Store`, held
by torchrun or rank 0) and ends. In every other process a thread polls the store and ends the
process after GRACE seconds, even if the main thread is inside a collective. Otherwise a collective
could wait half an hour for the failed rank, and Python cannot interrupt a collective of NCCL.

    key    value
    end    the first failure, {rank, host, text, code}
    main   the failure of rank 0

If all ranks fail with the same error, only rank 0 prints the error. A rank that only lost the
connection to another rank prints nothing, because the other rank reports the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypedDict

import torch.distributed as dist
from torch.distributed import (  # documented, but not in its `__all__`
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from megatron.files import write_text

GRACE = 5.0
"""The seconds after a rank's failure until every process that still runs is ended."""
CAUSE_WAIT = 3.0
"""The seconds to wait until another rank's error is in the store. It must be less than GRACE."""
POLL_INTERVAL = 1.0
"""The seconds between two reads of the store."""
BUSY_INTERVAL = 0.05
"""The seconds between two reads while the ranks agree on where to leave (see `preemption`)."""
OPEN_TIMEOUT = 1800.0
"""The time limit for rank 0 to open the store, in seconds."""
STORE_TIMEOUT = 60.0
"""The seconds without a response after which the store counts as lost."""
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
_IF_WRITABLE = contextlib.suppress(OSError)
"""Ignores output errors (no reader, a full disk) in a process that is about to end anyway."""


class Failure(TypedDict):
    """The error of a rank, as written in JSON into the job's key-value store.

    `code` is the exit code for all other ranks.
    """

    rank: int
    host: str
    text: str
    code: int


_ending = threading.Event()
"""Set as soon as this process ends itself, so that its `Watch` does not end it too."""
_received: list[Failure] = []
"""The failure that this process's `Watch` read, kept because the store may be lost later."""


def is_member() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return several and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


class Watch:
    """A thread that ends this process when another rank fails.

    Every POLL_INTERVAL seconds, the thread looks for a failure in the job's key-value store
    (torch.distributed's `Store`). Create the watch before the process joins the job, so that
    failures while joining are noticed.

    Args:
        exchange: a function that the thread calls with the store each time it has found no failure.
            It returns whether the thread should look again soon, after BUSY_INTERVAL seconds.
    """

    def __init__(self, exchange: Callable[[Store], bool] = lambda store: False) -> None:
        self._exchange = exchange
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Call this method after all ranks have reached the job's normal end."""
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        first, store, until = None, None, time.monotonic() + OPEN_TIMEOUT
        while first is None:
            pause = POLL_INTERVAL
            try:
                store = store or _connect()
                if store.check(["end"]):
                    first = json.loads(store.get("end"))
                elif self._exchange(store):
                    pause = BUSY_INTERVAL
                until = time.monotonic() + STORE_TIMEOUT
            except RuntimeError:
                store = None
                if time.monotonic() > until:  # the process that holds the store has ended
                    first = _local_failure(LOST_TEXT)
            if first is None and self._over.wait(pause):
                return
        _received.append(first)
        if not (self._over.wait(GRACE) or _ending.is_set()):
            _print(first) if first["rank"] == _rank() else print_if_elsewhere(first)
            os._exit(first["code"])


def end_process(
    text: str, *, lost: bool = False, code: int = 1, ends_all: bool = False
) -> NoReturn:
    """Report an error to the other ranks and end this process. The other ranks then end too.

    Process groups stay open, because all ranks would have to close them together.

    Args:
        text: the error message.
        lost: whether the error is only a lost connection to another process. That other process
            then reports the cause.
        code: the exit code of this process.
        ends_all: whether the other ranks end with `code` too; otherwise they end with 1.
    """
    _ending.set()
    failure = _local_failure(text, code if ends_all else 1)
    if not lost:
        _write_for_launcher(text)
    try:
        cause = _report(failure, lost)
        code = code if cause is None else cause["code"]
    except RuntimeError:  # there is no store, so no other rank prints the error
        _print(failure)
    if sys.stdout:
        with _IF_WRITABLE:
            sys.stdout.flush()
    os._exit(code)


def lost_contact(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that caused it, means that another process has ended."""
    while error is not None:
        is_torchs = type(error) is RuntimeError or isinstance(error, dist.DistBackendError)
        is_loss = is_torchs and LOST_CONTACT.search(str(error))
        if is_loss or isinstance(error, dist.DistNetworkError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report(failure: Failure, lost: bool) -> Failure | None:
    """Write `failure` into the job's store, and print it unless another rank prints the same error.

    Args:
        lost: as in `end_process`.

    Returns:
        With `lost`, the other rank's failure that caused this one, if it is known; otherwise None.
    """
    if lost and _received and _received[0]["rank"] != failure["rank"]:
        print_if_elsewhere(_received[0])
        return _received[0]
    is_main = failure["rank"] == 0
    opens = is_main and not (dist.is_initialized() or _launcher_has_store())
    store = _connect(CAUSE_WAIT, opens)
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
        time.sleep(CAUSE_WAIT if opens else 1)
    return None


def _write_for_launcher(text: str) -> None:
    """Write the error into torchrun's error file.

    torchrun's summary names the rank with the oldest error file as the root cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    when = {"py_callstack": text, "timestamp": str(int(time.time()))}
    if path:
        with _IF_WRITABLE:
            write_text(Path(path), json.dumps({"message": {"message": text, "extraInfo": when}}))


def _wait_for(store: Store, key: str) -> Failure | None:
    """Return the failure stored at `key`; None if none is stored after CAUSE_WAIT seconds."""
    until = time.monotonic() + CAUSE_WAIT
    while not store.check([key]):  # torch's `wait` would print a warning
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
    return json.loads(store.get(key))


def _connect(patience: float = 0.0, opens: bool = False) -> Store:
    """Open a new connection to the job's store and return it.

    The job's own connection cannot be used, because another thread may be blocked on it.

    Args:
        patience: the seconds for which this call tries to connect again after a failure.
        opens: whether this call must create the store. This is needed if rank 0 failed before
            creating it.

    Raises:
        RuntimeError: no store responds.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + patience
    while not (opens or _answers(address, port)):  # torch's own attempts print a page of warnings
        if time.monotonic() > until:
            raise RuntimeError(f"no store at {address}:{port}")
        time.sleep(0.2)
    store = TCPStore(
        address, port, is_master=opens, timeout=timedelta(seconds=10), wait_for_workers=False
    )
    # torchrun's store survives a restart of the job, so there the key needs the restart count.
    # Other stores end with the job, and there each machine's agent may count differently.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if _launcher_has_store() else "only"
    return PrefixStore(f"failures/{attempt}", store)


def _launcher_has_store() -> bool:
    """Return whether torchrun holds the job's store; otherwise rank 0 holds it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
        return True
    return False


def _rank() -> int:
    return int(os.environ["RANK"])


def _local_failure(text: str, code: int = 1) -> Failure:
    return {"rank": _rank(), "host": socket.gethostname(), "text": text, "code": code}


def _print(failure: Failure) -> None:
    with _IF_WRITABLE:
        source = f"rank {failure['rank']} on {failure['host']}"
        print(f"{source}: {failure['text']}", file=sys.stderr, flush=True)


def print_if_elsewhere(failure: Failure) -> None:
    """Print `failure` if its rank runs on another machine. Only local rank 0 prints it."""
    if failure["host"] != socket.gethostname() and os.environ.get("LOCAL_RANK") == "0":
        _print(failure)
