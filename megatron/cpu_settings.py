"""Choose how long this process's threads spin while they wait, and keep freed memory for reuse.

Between two operations of torch, OpenMP's threads spin for a while before they sleep. On an idle
machine, a long spin makes a training step faster. If another program keeps the processors busy, a
long spin makes a training step half as fast (docs/lab/performance.md), because spinning threads use
processor time that working threads need.
"""

import ctypes
import os
import time
from pathlib import Path

LONG_SPIN, SHORT_SPIN = 30_000, 3_000
"""How often a waiting thread looks for work before it sleeps: for about 500 or 50 microseconds."""
VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
SAMPLES, PAUSE = 5, 0.002
# The reason for the choice of `choose_waiting`, as text for the log; empty before the choice.
_chosen: list[str] = []


def choose_waiting() -> None:
    """Choose how long OpenMP's waiting threads spin, depending on the load of the machine.

    The choice is stored in environment variables. If the user has already set one of these
    variables, nothing is changed. Call this function before torch is imported, because GCC's OpenMP
    library reads the variables during that import.
    """
    if VARIABLES & set(os.environ):
        return
    spin, why = spin_count(running_threads(), os.cpu_count() or 1)
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=str(spin))
    _chosen.append(why)


def described_waiting() -> str:
    """Return a text for the log that describes how this process's threads wait, and why."""
    values = (f"{name}={os.environ[name]}" for name in sorted(VARIABLES) if name in os.environ)
    return (
        f"{', '.join(values) or 'default'} ({_chosen[0] if _chosen else 'as the environment says'})"
    )


def waiting_of_children(count: int) -> dict[str, str]:
    """Return environment variables for `count` training processes that run at the same time.

    The variables make the threads of these processes spin only briefly, because the processes share
    the machine.
    """
    return {"GOMP_SPINCOUNT": str(SHORT_SPIN)} if _chosen and count > 1 else {}


def keep_memory() -> None:
    """Let the process keep freed memory, instead of returning it to the system.

    The next training step then reuses this memory without page faults, which otherwise occur for
    every 4 kB. The peak memory stays the same. The function sets two thresholds of glibc's `malloc`
    to their largest values. With other C libraries, the function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 32 << 20)


def spin_count(running: int | None, processors: int) -> tuple[int, str]:
    """Return the number of spins of a waiting thread, and a text with the reason for this number.

    Args:
        running: The number of other threads that run on this machine, or None if it is unknown.
        processors: The number of processors of this machine.
    """
    if running is None:  # so `sched_getaffinity` may be missing, too
        return SHORT_SPIN, "the load of this machine is unknown"
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() else len(os.sched_getaffinity(0))
    if is_limited(threads):
        return SHORT_SPIN, f"fewer than {threads} processors are allowed"
    load = f"{running} other threads ran, {processors} processors"
    return (LONG_SPIN if threads + running <= processors else SHORT_SPIN), load


def running_threads(source: Path = Path("/proc/loadavg")) -> int | None:
    """Return how many other threads of this machine run or wait for a processor.

    If the number is unknown, return None.

    Args:
        source: The file to read, in the format of Linux's `/proc/loadavg`.
    """
    counts = []
    for _ in range(SAMPLES):
        try:
            counts.append(int(source.read_text().split()[3].partition("/")[0]) - 1)
        except (OSError, IndexError, ValueError):  # not Linux
            return None
        time.sleep(PAUSE)
    return sorted(counts)[SAMPLES // 2]


def is_limited(threads: int, source: Path = Path("/sys/fs/cgroup/cpu.max")) -> bool:
    """Return whether a control group (cgroup) allows this process fewer than `threads` processors.

    Args:
        threads: The number of threads.
        source: The file with the limit, in the format of Linux's `cpu.max`.
    """
    try:
        quota, period = source.read_text().split()
    except (OSError, ValueError):
        return False
    return quota != "max" and int(quota) < threads * int(period)
