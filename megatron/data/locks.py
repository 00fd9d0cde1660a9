"""Locks between processes that want to make the same files: one makes them, the others wait.

`flock` is used because the kernel releases it when its holder dies. Some network file systems have
no locks, or do not share them between machines; there the work may be done twice. Therefore files
made under these locks are also renamed into place, each from a temporary name of its process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def try_lock(fd: int, *, wait: bool) -> bool | None:
    """Lock the open file `fd` for this process until it is closed.

    Returns:
        True if locked, False if another process holds the lock (never with `wait`), None if the
        file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock file `path` during the block. The file stays: removing it would be a race."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try_lock(fd, wait=True)
        yield
    finally:
        os.close(fd)
