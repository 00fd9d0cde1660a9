"""Describe the process that holds the lease of a run folder, and check if that process is alive."""

import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

PROC = Path("/proc")
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
"""Environment variables in which schedulers name the job."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease: a file that reserves a run folder for one process."""

    # A lease that an earlier version of this project wrote does not record `folder`.

    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    host: str = ""
    job: str | None = None
    since: str = ""
    machine: str | None = None
    started: str | None = None
    folder: tuple[str, int, int] | None = None


_HOLDER = TypeAdapter(Holder)


def describe_process() -> dict[str, Any]:
    """Return the description of this process for its lease."""
    # See `Holder`.
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "job": next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), None),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": _machine(),
        "started": start_time(os.getpid()),
        "id": uuid.uuid4().hex,
    }


def parsed(content: str) -> Holder | None:
    """Return the holder that a lease's content describes, or None if the content is damaged."""
    with suppress(ValueError):
        return _HOLDER.validate_json(content)
    return None


def who(content: str) -> str:
    """Return a text that says who holds a lease, for messages.

    Args:
        content: The content of the lease.
    """
    holder = parsed(content)
    if holder is None:
        return "an unknown process"
    job = f"job {holder.job}, " if holder.job else ""
    return f"process {holder.pid} on {holder.host} ({job}since {holder.since})"


def is_alive(content: str) -> bool | None:
    """Return whether the process that holds a lease is alive; None if this is unknown.

    Args:
        content: The content of the lease.
    """
    holder, here = parsed(content), _machine()
    if holder is None or here is None or holder.machine != here:
        return None
    try:
        os.kill(holder.pid, 0)
        return start_time(holder.pid) == holder.started
    except OSError as error:  # it has ended, or is another user's process
        return False if isinstance(error, ProcessLookupError) else None


def _machine() -> str | None:
    """Return a text that identifies this container and its last boot, or None without `/proc`."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return None


def start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since the boot, or None if it has ended."""
    # The result is also None on a system without `/proc`.
    path = PROC / str(pid) / "stat"
    if not path.exists():
        return None
    state, *fields = path.read_text().rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]  # a zombie has ended, and waits for its parent
