"""Let only one process at a time write a run folder, on all machines that share the folder.

The writer of a folder is the holder of its *lease*, the file `.lease-N`. Only one process can
create this file, and the file describes that process. A thread of the holder touches the file every
HEARTBEAT seconds. All times are from the file server's clock, because the machines' clocks differ.

A holder is dead if it ran on this machine and its process has ended, or if its heartbeat stopped
LIFETIME seconds ago. A process that finds the holder of `.lease-N` dead creates `.lease-N+1` and
removes `.lease-N`, so two processes cannot both take the folder over. A holder can be considered
dead by mistake, for example while its machine is suspended. Before each write, a holder therefore
checks that its lease still exists. If the lease is gone, the holder writes nothing.

A lease also names its folder. If somebody copies the folder of a running job, the lease in the copy
names the original folder, so the lease does not reserve the copy.

A process can hand its lease to a process that it starts (`handed`). The new process replaces this
lease by a lease of its own. No other process can reserve the folder in between.
"""

import json
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.ending import GIVE_BACK
from megatron.engine.errors import CheckpointError
from megatron.engine.job.holder import describe_process, is_alive, parsed, who
from megatron.files import flush, naming, read_small

HEARTBEAT = 5.0
"""The seconds between two heartbeats. At a heartbeat, the holder touches its lease's file."""
LIFETIME = 60.0
"""A holder whose process cannot be checked is dead after this many seconds without a heartbeat."""
LONGEST_WAIT = 5 * LIFETIME
"""The most seconds that a process waits for a folder, however many leases the folder holds."""
MOST_BYTES = 4096
"""The largest size of a lease that is read, in bytes."""
HANDED = "KERPLE_LEASE"
"""The environment variable in which a process hands its lease to a process that it starts."""

Confirm = Callable[[], None]
"""A function that raises CheckpointError if this process may no longer write the run folder."""


def unleased() -> None:
    """Do nothing. Callers use this function as the check of a lease if a folder needs no lease."""
    # This is a `Confirm` function.


@contextmanager
def sole_writer(folder: Path, key: str = "save") -> Iterator[Confirm]:
    """Reserve `folder` for this process during the `with` block.

    The context manager yields a function that raises CheckpointError if this process has lost the
    reservation. Call that function before each change of a file that another run may need.

    Args:
        folder: The folder; it is created if it does not exist.
        key: The setting that names the folder, such as `save`. Error messages contain it.

    Raises:
        CheckpointError: Another process that is alive has reserved the folder.
    """
    # The reservation is a lease, a file in `folder`. Files that another run may need are `latest`,
    # finished checkpoints and metrics.
    path, text = _take(folder, key)
    place = _place(folder)
    over = threading.Event()

    def is_ours() -> bool:
        found = _read(path)
        return found is not None and found[0] == text

    def confirm() -> None:
        if is_ours():
            return
        if _place(folder) != place:
            why = "(the folder was deleted, moved, or replaced by another one)"
        elif others := " and ".join(who(content) for content in leases(folder).values()):
            why = (
                f"({others}): this process gave no sign of life for {LIFETIME:.0f} s, because it "
                "was stopped or did not reach the file server"
            )
        else:
            why = "(its lease was deleted)"
        raise CheckpointError(
            f"{key}: {folder} is no longer this job's {why}. "
            "This process has written nothing there since, and ends"
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


def handed(folder: Path) -> dict[str, str]:
    """Return environment variables that pass this process's lease of `folder` to a child."""
    # The child takes the lease over when it calls `sole_writer`. This process holds it until then.
    return {HANDED: next(iter(leases(folder).values()), "")}


def _take(folder: Path, key: str) -> tuple[Path, str]:
    """Take the lease of `folder` for this process; return the lease's path and content.

    Raises:
        CheckpointError: Another process holds the lease and is alive, or this process could not
            take the lease for another reason.
    """
    # An attempt lasts at most LONGEST_WAIT seconds.
    deadline = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < deadline:
        _make(folder)
        # Another process may create the lease first, or remove the folder (`publish.new_folder`).
        with suppress(FileExistsError, FileNotFoundError):
            text = json.dumps(describe_process() | {"folder": _place(folder)})
            dead = leases(folder)
            for path, content in dead.items():
                if content != os.environ.get(HANDED):
                    _wait_for_end(path, content, key, deadline)
            number = max((int(each.name.rpartition("-")[2]) for each in dead), default=0)
            path = folder / f".lease-{number + 1}"
            _create(path, text)
            if leases(folder).items() <= dead.items() | {(path, text)}:
                for each in dead:
                    each.unlink(missing_ok=True)
                return path, text
            path.unlink()  # another process saw other leases than this one, and created its own
        time.sleep(random.uniform(0.05, 0.5))
    raise CheckpointError(f"{key}: {folder}: no lease could be taken in {LONGEST_WAIT:.0f} s")


def _make(folder: Path) -> None:
    """Create the folder unless it exists.

    Raises:
        OSError: The folder cannot be created, for example because `folder` is a file.
    """
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            flush(folder.parent)  # a power loss would take the whole new run with the name
    except FileExistsError:  # also if another process has just removed the folder
        if folder.is_symlink() or folder.is_file():
            raise


def _create(path: Path, text: str) -> None:
    """Create the lease file `path` with the content `text`.

    Raises:
        FileExistsError: Another process has created the lease.
    """
    # The file is removed if its content cannot be written.
    with naming(path), path.open("xb", buffering=0) as file:
        try:
            file.write(text.encode())
        except OSError:  # later jobs would take an empty file for the lease of a running process
            path.unlink()
            raise


def _wait_for_end(path: Path, content: str, key: str, deadline: float) -> None:
    """Wait until it is known whether the holder of a lease is dead. If it is dead, return.

    Return also if the holder has removed the lease, or if the lease is a copy that names another
    folder.

    Args:
        path: The lease's file.
        content: The content of the lease.
        key: The setting that names the folder, for the error message.
        deadline: The time (of `time.monotonic`) at which to give up.

    Raises:
        CheckpointError: The holder is alive, or it is unknown at the deadline whether the holder is
            alive.
    """
    # If this machine cannot check the holder's process, the holder counts as dead after LIFETIME
    # seconds without a heartbeat. A holder's process that still exists then is an error.
    first, begun = None, time.monotonic()
    # The file server sets the times of this file and of the lease by the same clock.
    with tempfile.TemporaryFile(dir=path.parent) as clock:
        while (found := _read(path)) and found[0] == content:
            alive = is_alive(content)
            os.utime(clock.fileno())
            age = os.fstat(clock.fileno()).st_mtime - found[1]
            age = max(age, time.monotonic() - begun)  # a heartbeat may be dated in the future
            copied = alive and _names_another(content, path.parent)
            beaten = first is not None and found[1] != first
            if copied or alive is False or (alive is None and age > LIFETIME and not beaten):
                return
            if first is None:
                first = found[1]
                text = f"{path.parent} is held by {who(content)}; looking whether it is alive"
                print(text, flush=True)
            if beaten or age > LIFETIME or time.monotonic() > deadline:
                raise CheckpointError(
                    f"{key}: {path.parent} is in use by {who(content)}, and only one job at a time "
                    f"can write a folder; name another `{key}`, or stop that job first"
                )
            time.sleep(0.5)


def leases(folder: Path) -> dict[Path, str]:
    """Return a dict from path to content of each lease in `folder`. The folder may be missing."""
    paths = [each for each in folder.glob(".lease-*") if re.fullmatch(r"\.lease-[0-9]+", each.name)]
    return {path: found[0] for path in paths if (found := _read(path))}


def _read(path: Path) -> tuple[str, float] | None:
    """Return (content of a lease, time of the last heartbeat), or None if there is no lease file.

    Raises:
        OSError: The file cannot be read, or is not a lease.
    """
    try:  # the file is opened first: NFS then asks the server, where `stat` alone may use a cache
        return read_small(path, MOST_BYTES).decode(errors="replace"), path.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno is not None and not path.is_dir():  # the file server failed, for example
            raise
        raise OSError(f"{path}: {error}; remove it if no job is writing the folder") from None


def _place(folder: Path) -> tuple[str, int, int] | None:
    """Return the path, device and inode of `folder`; None if `folder` does not exist."""
    if not folder.exists():
        return None
    found = folder.stat()
    return str(folder.resolve()), found.st_dev, found.st_ino


def _names_another(content: str, folder: Path) -> bool:
    """Return whether the lease in `folder` names another folder.

    Such a lease is a copy, which was made when somebody copied the folder.

    Args:
        content: The content of the lease.
        folder: The folder that contains the lease.
    """
    # A process of this machine has written the lease.
    holder, place = parsed(content), _place(folder)
    if holder is None or holder.folder is None or place is None:
        return False
    return holder.folder[0] != place[0] and holder.folder[1:] != place[1:]
