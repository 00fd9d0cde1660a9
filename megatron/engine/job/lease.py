"""Let only one process at a time write a run folder, on all machines that share the folder.

The writer of a folder is the holder of its *lease*, the file `.lease-N`. Only one process can
create this file, and the file describes that process. A thread of the holder touches the file every
HEARTBEAT seconds. All times are from the file server's clock, because the machines' clocks differ.

A holder is dead if it ran on this machine and its process has ended, or if its heartbeat stopped
LIFETIME seconds ago. A process that finds the holder of `.lease-N` dead creates `.lease-N+1` and
removes `.lease-N`, so two processes cannot both take the folder over. A holder can be considered
dead by mistake, for example while its machine is suspended. Before each write, a holder therefore
checks that its lease still exists. If the lease is gone, the holder writes nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.ending import GIVE_BACK
from megatron.engine.errors import CheckpointError

HEARTBEAT = 5.0
"""The seconds between two heartbeats. At a heartbeat, the holder touches its lease's file."""
LIFETIME = 60.0
"""A holder whose process cannot be checked is dead after this many seconds without a heartbeat."""
PROC = Path("/proc")
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""Environment variables in which schedulers name the job."""

Confirm = Callable[[], None]
"""A function that raises CheckpointError if this process may no longer write the run folder."""


def unleased() -> None:
    """Do nothing: the `Confirm` function for a folder that needs no lease or is only read."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[Confirm]:
    """Hold the lease of `folder` during the `with` block, and yield a `Confirm` function.

    Call the yielded function before each change of a file that another run may need: `latest`,
    finished checkpoints, metrics. The yielded function raises CheckpointError if this process has
    lost the lease. `folder` is created if it does not exist.

    Raises:
        CheckpointError: Another process holds the lease and is alive.
    """
    path, text = _take(folder)
    over = threading.Event()

    def is_ours() -> bool:
        found = _read(path)
        return found is not None and found[0] == text

    def confirm() -> None:
        if not is_ours():
            others = " and ".join(_who(content) for content in _leases(folder).values())
            raise CheckpointError(
                f"save: {folder} is no longer this job's ({others or 'its lease was deleted'}): "
                f"this process gave no sign of life for {LIFETIME:.0f} s, because it was stopped "
                "or did not reach the file server. It has written nothing there since, and ends"
            )

    def release() -> None:
        if is_ours():
            path.unlink(missing_ok=True)

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            with suppress(OSError):  # the file server may come back
                if is_ours():
                    os.utime(path)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    GIVE_BACK.append(release)
    try:
        yield confirm
    finally:
        over.set()
        thread.join()
        GIVE_BACK.remove(release)
        release()


def _take(folder: Path) -> tuple[Path, str]:
    """Take the lease of `folder` for this process; return the path and the content of the lease.

    Raises:
        CheckpointError: Another process holds the lease and is alive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(describe_process())
    while True:
        dead = _leases(folder)
        for path, content in dead.items():
            _wait_for_end(path, content)
        number = max((int(each.name.rpartition("-")[2]) for each in dead), default=0)
        path = folder / f".lease-{number + 1}"
        with suppress(FileExistsError):
            _create(path, text)
        found = _leases(folder)
        if found.get(path) == text:
            if found.items() <= dead.items() | {(path, text)}:
                for each in dead:
                    each.unlink(missing_ok=True)
                return path, text
            path.unlink()  # another process saw other leases than this one, and created its own
        time.sleep(random.uniform(0.05, 0.5))


def _create(path: Path, text: str) -> None:
    """Create the lease file `path` with the content `text`.

    If the disk is full, the file stays empty and is removed. Later jobs would otherwise take the
    empty file for the lease of a running process, and would wait.

    Raises:
        FileExistsError: Another process has created the lease.
    """
    with path.open("xb", buffering=0) as file:
        try:
            file.write(text.encode())
        except OSError:
            path.unlink()
            raise


def _wait_for_end(path: Path, content: str) -> None:
    """Wait until the holder of the lease `path` is dead or has removed the lease.

    If this machine cannot check the holder's process, the holder counts as dead after LIFETIME
    seconds without a heartbeat.

    Args:
        content: The content of the lease.

    Raises:
        CheckpointError: The holder is alive: it has sent a heartbeat during the wait, or its
            process still exists LIFETIME seconds after the last heartbeat.
    """
    first = None
    # The file server sets the times of this file and of the lease by the same clock.
    with tempfile.TemporaryFile(dir=path.parent) as clock:
        while (found := _read(path)) and found[0] == content:
            alive = is_alive(content)
            os.utime(clock.fileno())
            age = os.fstat(clock.fileno()).st_mtime - found[1]
            if alive is False or (alive is None and age > LIFETIME):
                return
            if first is None:
                first = found[1]
                print(
                    f"{path.parent} is held by {_who(content)}; looking whether it is alive",
                    flush=True,
                )
            if found[1] != first or age > LIFETIME:
                raise CheckpointError(
                    f"save: {path.parent} is in use by {_who(content)}, and only one job at a time "
                    "can write a folder; name another `save`, or stop that job first"
                )
            time.sleep(0.5)


def _leases(folder: Path) -> dict[Path, str]:
    """Return a dict from the path of each lease in `folder` to its content."""
    paths = [each for each in folder.iterdir() if re.fullmatch(r"\.lease-\d{1,9}", each.name)]
    return {path: found[0] for path in paths if (found := _read(path))}


def _read(path: Path) -> tuple[str, float] | None:
    """Return a lease's content and the time of its last heartbeat; None if the file is missing.

    The file is opened because NFS then asks the server; `stat` alone would return cached values.
    """
    try:
        with path.open(errors="replace") as file:
            return file.read(4096), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def describe_process() -> dict[str, Any]:
    """Return the description of this process for its lease."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "job": next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), None),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": _machine(),
        "started": start_time(os.getpid()),
        "id": uuid.uuid4().hex,
    }


def _parsed(content: str) -> dict[str, Any]:
    """Return the description of the holder in a lease's content; {} if it is incomplete."""
    with suppress(ValueError):
        if isinstance(found := json.loads(content), dict):
            return found
    return {}


def _who(content: str) -> str:
    """Return a text for messages that names the holder of a lease."""
    holder = _parsed(content)
    if not holder:
        return "an unknown process"
    job = f"job {holder['job']}, " if holder.get("job") else ""
    return f"process {holder.get('pid')} on {holder.get('host')} ({job}since {holder.get('since')})"


def is_alive(content: str) -> bool | None:
    """Return whether a lease's holder is alive; None if this process cannot find out.

    Args:
        content: The content of the lease.
    """
    holder, here = _parsed(content), _machine()
    pid = holder.get("pid")
    if here is None or holder.get("machine") != here or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
        return start_time(pid) == holder.get("started")
    except OSError as error:  # it has ended, or is another user's process
        return False if isinstance(error, ProcessLookupError) else None


def _machine() -> str | None:
    """Return an id of this container and its machine's boot; None if there is no `/proc`."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return None


def start_time(pid: int) -> str | None:
    """Return the time at which a process started, in clock ticks since the machine's boot.

    The result is None if the process has ended or the system has no `/proc`.
    """
    path = PROC / str(pid) / "stat"
    if not path.exists():
        return None
    state, *fields = path.read_text().rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]  # a zombie has ended, and waits for its parent
