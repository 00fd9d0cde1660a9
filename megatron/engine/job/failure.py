"""The failure of one rank ends the whole job at once, with one message for each machine.

A rank that fails writes its error into the job's store (torchrun's, or rank 0's) before it ends. In
every other process a thread polls the store and ends the process after GRACE seconds, whatever the
process is doing: a collective that misses a rank may wait for half an hour, and Python cannot
interrupt a collective of NCCL.

    key    value
    end    the first failure, {rank, host, text}
    main   the failure of rank 0

If all ranks fail with the same error, only rank 0 prints it. Connection errors are symptoms: a rank
that lost its peer prints nothing, so that the peer's own error is printed.
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
"""Seconds in which the other processes may end by themselves."""
CAUSE_WAIT = 3.0
"""Seconds to wait for the error of another rank; less than GRACE."""
POLL_INTERVAL = 1.0
"""Seconds between two looks into the store."""
OPEN_TIMEOUT = 1800.0
"""Seconds in which rank 0 must open the store."""
STORE_TIMEOUT = 60.0
"""Seconds without an answer after which the store counts as lost."""
LOST_TEXT = (
    "error: lost contact with another process of this job, which ended without a message: it was "
    "killed, or its machine ran out of memory or lost its network; see the system log there"
)
LOST_CONTACT = re.compile(
    "closed by peer|reset by peer|broken pipe|socket closed|connection was closed|remote process"
    "|failed to recv|failed to send|connection refused|no data available",
    re.IGNORECASE,
)
"""What gloo, NCCL and the store report about a process that has ended."""
_IF_WRITABLE = contextlib.suppress(OSError)
"""Around output of a process that ends in any case: a reader may be gone, a disk may be full."""


class Failure(TypedDict):
    """An error as the store keeps it."""

    rank: int
    host: str
    text: str


_ending = threading.Event()
"""Set when this process ends by itself."""
_received: list[Failure] = []
"""The failure that the watch read: the store may be lost by the time it is needed."""


def is_member() -> bool:
    """Whether a launcher started this process as one of several."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return several and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


class Watch:
    """A thread that ends this process when another rank fails.

    Start it before the process joins the job, so that it also sees failures while joining.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, at a normal end that all ranks have reached."""
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        first, store, until = None, None, time.monotonic() + OPEN_TIMEOUT
        while first is None:
            try:
                store = store or _connect()
                if store.check(["end"]):
                    first = json.loads(store.get("end"))
                until = time.monotonic() + STORE_TIMEOUT
            except RuntimeError:
                store = None
                if time.monotonic() > until:  # the store is lost, and rank 0 that held it
                    first = _local_failure(LOST_TEXT)
            if first is None and self._over.wait(POLL_INTERVAL):
                return
        _received.append(first)
        if not (self._over.wait(GRACE) or _ending.is_set()):
            _print(first) if first["rank"] == _rank() else print_if_elsewhere(first)
            os._exit(1)


def end_process(text: str, *, lost: bool = False, code: int = 1) -> NoReturn:
    """End this process, and with it the job.

    Process groups stay open, because all ranks would have to close them together.

    Args:
        text: the error.
        lost: the error is the loss of another process, which reports the cause itself.
        code: exit code.
    """
    _ending.set()
    failure = _local_failure(text)
    if not lost:
        _write_for_launcher(text)
    try:
        _report(failure, lost)
    except RuntimeError:  # there is no store, so no other rank knows
        _print(failure)
    if sys.stdout:
        with _IF_WRITABLE:
            sys.stdout.flush()
    os._exit(code)


def lost_contact(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, reports the loss of another process."""
    while error is not None:
        is_torchs = type(error) is RuntimeError or isinstance(error, dist.DistBackendError)
        is_loss = is_torchs and LOST_CONTACT.search(str(error))
        if is_loss or isinstance(error, dist.DistNetworkError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report(failure: Failure, lost: bool) -> None:
    """Write the failure into the store, and print it unless another rank prints the same."""
    if lost and _received and _received[0]["rank"] != failure["rank"]:
        print_if_elsewhere(_received[0])
        return
    is_main = failure["rank"] == 0
    opens = is_main and not (dist.is_initialized() or _launcher_has_store())
    store = _connect(CAUSE_WAIT, opens)
    if lost and (first := _wait_for(store, "end")):
        print_if_elsewhere(first)
        return
    if is_main and not lost:
        store.set("main", json.dumps(failure))
    written: Failure = json.loads(store.compare_set("end", "", json.dumps(failure)))
    others = [written] if is_main else [written, _wait_for(store, "main") or written]
    same = [each for each in others if each["text"] == failure["text"] and each != failure]
    if same and (lost or not is_main):
        print_if_elsewhere(same[-1])
    else:
        _print(failure)
    if is_main:  # it may hold the store, which the other ranks read a moment later
        time.sleep(CAUSE_WAIT if opens else 1)


def _write_for_launcher(text: str) -> None:
    """Write torchrun's error file; its summary names the oldest one as the root cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    when = {"py_callstack": text, "timestamp": str(int(time.time()))}
    if path:
        with _IF_WRITABLE:
            write_text(Path(path), json.dumps({"message": {"message": text, "extraInfo": when}}))


def _wait_for(store: Store, key: str) -> Failure | None:
    """The value of `key`; None if it is not there after CAUSE_WAIT seconds."""
    until = time.monotonic() + CAUSE_WAIT
    while not store.check([key]):  # torch's `wait` would print a warning
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
    return json.loads(store.get(key))


def _connect(patience: float = 0.0, opens: bool = False) -> Store:
    """A new connection to the store: another thread may be blocked on the job's connection.

    Args:
        patience: seconds in which to try again.
        opens: rank 0 failed before it opened the job's store; this call opens it.

    Raises:
        RuntimeError: no store answers.
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
    # The launcher's store outlives an attempt. Only then the key needs the number of the attempt:
    # agents count attempts separately, so another store must not depend on it.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if _launcher_has_store() else "only"
    return PrefixStore(f"failures/{attempt}", store)


def _launcher_has_store() -> bool:
    """Whether torchrun holds the job's store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
        return True
    return False


def _rank() -> int:
    return int(os.environ["RANK"])


def _local_failure(text: str) -> Failure:
    return {"rank": _rank(), "host": socket.gethostname(), "text": text}


def _print(failure: Failure) -> None:
    with _IF_WRITABLE:
        source = f"rank {failure['rank']} on {failure['host']}"
        print(f"{source}: {failure['text']}", file=sys.stderr, flush=True)


def print_if_elsewhere(failure: Failure) -> None:
    """Print a failure of another machine, once on this machine."""
    if failure["host"] != socket.gethostname() and os.environ.get("LOCAL_RANK") == "0":
        _print(failure)
