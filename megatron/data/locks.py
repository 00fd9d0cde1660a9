"""Provide file locks, so that one process writes a shared file while the other processes wait.

The locks use `flock`, because the operating system releases such a lock when its process dies. Some
network file systems have no locks, or have locks that other machines do not see. On such a file
system, two processes may do the same work. Therefore each process writes its files under temporary
names of its own and renames the files when they are complete.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def try_lock(fd: int, *, wait: bool) -> bool | None:
    """Lock the open file `fd` for this process. The lock lasts until `fd` is closed.

    Args:
        wait: Whether to wait until no other process holds the lock.

    Returns:
        True if this process now holds the lock. False if another process holds the lock. None if
        the file system has no locks.
    """
    # The result is False only if `wait` is False.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Lock the file `path` during the `with` block. If another process holds the lock, wait.

    The file is created if it does not exist.
    """
    # It is not removed afterwards, because other processes may be waiting for the lock on it.
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try_lock(fd, wait=True)
        yield
    finally:
        os.close(fd)
