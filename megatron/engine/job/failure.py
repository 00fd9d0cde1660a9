"""One rank's failure ends the whole job at once, with one message for each machine.

A rank that fails writes what happened into the job's store (torchrun's, or rank 0's) before it
ends. In every other process a thread waits for that, and ends the process after GRACE seconds,
whatever it is doing: a collective that misses a rank may wait for half an hour, and an NCCL one
cannot be interrupted from Python.

    key    value
    end    the first failure, {rank, host, text}
    main   that of rank 0

An error that all ranks meet alike is said once, by rank 0. An error of a connection is never the
cause: a rank that has lost another one leaves the word to it.
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
from typing import Any, NoReturn

import torch.distributed as dist

GRACE = 5.0
"""Seconds that the other processes have to end by themselves."""
WORD = 3.0
"""Seconds to wait for another rank to say why it failed; less than GRACE."""
EVERY = 1.0
"""Seconds between two looks."""
JOINING = 1800.0
"""Seconds for rank 0 to open the store."""
AGAIN = 60.0
"""Seconds for the store to answer again, before it counts as gone."""
Failure = dict[str, Any]
LOST_TEXT = (
    "error: lost contact with another process of this job, which ended without a word: it was "
    "killed, or its machine ran out of memory or was cut off; the system's log there tells"
)
LOST = re.compile(
    "closed by peer|reset by peer|broken pipe|socket closed|connection was closed|remote process"
    "|failed to recv|failed to send|connection refused|no data available",
    re.IGNORECASE,
)
"""What gloo, NCCL and the store say of a process that is no longer there."""


def is_member() -> bool:
    """Whether a launcher has made this process one of several."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return several and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


class Watch:
    """Ends this process when another rank fails.

    Made before the job is joined, so that joining itself may fail somewhere.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """At a normal end, which all ranks have come to."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        first, store, until = None, None, time.monotonic() + JOINING
        while first is None:
            try:
                store = store or _connect()
                if store.check(["end"]):
                    first = json.loads(store.get("end"))
                until = time.monotonic() + AGAIN
            except RuntimeError:
                store = None
                if time.monotonic() > until:  # it is gone, and rank 0 that held it
                    first = _own(LOST_TEXT)
            if first is None and self._over.wait(EVERY):
                return
        _heard.update(first)
        if not (self._over.wait(GRACE) or _ending.is_set()):
            _print(first) if first["rank"] == _rank() else _pass_on(first)
            os._exit(1)


_ending = threading.Event()
"""This process ends by itself."""
_heard: Failure = {}
"""What the watch was told: the store may be gone when it is asked for."""


def end_process(text: str, *, lost: bool = False, code: int = 1) -> NoReturn:
    """End this process, and with it the job.

    Nothing is cleaned up: to leave a process group takes all ranks.

    Args:
        text: what happened.
        lost: another process was lost, and will have said why.
    """
    _ending.set()
    own = _own(text)
    if not lost:
        _tell_launcher(text)
    try:
        _tell(own, lost)
    except RuntimeError:  # no store: nobody to tell, nobody who has told
        _print(own)
    with contextlib.suppress(OSError, AttributeError):  # without a reader; without stdout at all
        sys.stdout.flush()
    os._exit(code)


def lost_contact(error: BaseException | None) -> bool:
    """Whether the error, or what it came from, says that another process is gone."""
    while error is not None:
        torchs = type(error) is RuntimeError or isinstance(error, dist.DistBackendError)
        if isinstance(error, dist.DistNetworkError) or (torchs and LOST.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tell(own: Failure, lost: bool) -> None:
    """Write the failure down, and print it unless another rank does."""
    if lost and _heard.get("rank") not in (None, own["rank"]):
        _pass_on(_heard)
        return
    main = own["rank"] == 0
    opens = main and not (dist.is_initialized() or _launcher_has_store())
    store = _connect(WORD, opens)
    if lost and (first := _said(store, "end")):
        _pass_on(first)
        return
    if main and not lost:
        store.set("main", json.dumps(own))
    first = json.loads(store.compare_set("end", "", json.dumps(own)))
    others = [first] if main else [first, _said(store, "main") or first]
    alike = [each for each in others if each["text"] == own["text"] and each != own]
    if alike and (lost or not main):
        _pass_on(alike[-1])
    else:
        _print(own)
    if main:  # it may hold the store that the others read, and come to later
        time.sleep(WORD if opens else 1)


def _tell_launcher(text: str) -> None:
    """torchrun's summary names as the root cause who wrote such a file first."""
    with contextlib.suppress(KeyError, OSError):
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        temporary = path.with_name(path.name + ".unfinished")
        when = {"py_callstack": text, "timestamp": str(int(time.time()))}
        temporary.write_text(json.dumps({"message": {"message": text, "extraInfo": when}}))
        temporary.replace(path)


def _said(store: dist.Store, key: str) -> Failure | None:
    """The value of `key`, once it is there; None if it does not come."""
    until = time.monotonic() + WORD
    while not store.check([key]):  # `wait` would grumble on the console
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
    return json.loads(store.get(key))


def _connect(patience: float = 0.0, opens: bool = False) -> dist.Store:
    """A connection of one's own: another thread may be waiting at the job's.

    Args:
        patience: seconds to try again.
        opens: rank 0 has not come to opening the job's store, so this is to be it.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + patience
    while not (opens or _answers(address, port)):  # torch itself would fill a page with complaints
        if time.monotonic() > until:
            raise RuntimeError(f"no store at {address}:{port}")
        time.sleep(0.2)
    options = {"is_master": opens, "timeout": timedelta(seconds=10), "wait_for_workers": False}
    store = dist.TCPStore(address, port, **options)
    # A launcher's outlives an attempt. Its agents count each for itself: no name for another store.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if _launcher_has_store() else "only"
    return dist.PrefixStore(f"failures/{attempt}", store)


def _launcher_has_store() -> bool:
    """Whether the job's store is torchrun's, not rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
        return True
    return False


def _rank() -> int:
    return int(os.environ["RANK"])


def _own(text: str) -> Failure:
    return {"rank": _rank(), "host": socket.gethostname(), "text": text}


def _print(failure: Failure) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        who = f"rank {failure['rank']} on {failure['host']}"
        print(f"{who}: {failure['text']}", file=sys.stderr, flush=True)


def _pass_on(failure: Failure) -> None:
    """Print it once on each machine but its own."""
    if failure["host"] != socket.gethostname() and os.environ.get("LOCAL_RANK") == "0":
        _print(failure)
