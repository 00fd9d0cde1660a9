"""Adapt this process to the processor: how its threads wait, and which memory it keeps.

Between two operations of torch, OpenMP's threads spin for a while before they sleep. A training
step is slower if they do not spin, and several times as slow beside a busy program if they spin for
long (docs/performance.md), because threads that spin take the processor from threads that work.
"""

from __future__ import annotations

import ctypes
import os

SPIN = 3_000
"""How often a waiting thread looks for work before it sleeps: for about 50 microseconds."""
VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}


def choose_waiting() -> None:
    """Let threads spin `SPIN` times, unless the environment says how they wait.

    This must run before torch is imported, because its OpenMP library (GCC's) reads the variables
    then.
    """
    if not VARIABLES & set(os.environ):
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=str(SPIN))


def described_waiting() -> str:
    """Return a text for the log that says how this process's threads wait."""
    values = (f"{name}={os.environ[name]}" for name in sorted(VARIABLES) if name in os.environ)
    return ", ".join(values)


def keep_memory() -> None:
    """Let the process keep freed memory, instead of returning it to the system.

    The next training step then reuses this memory, without a page fault for every 4 kB. The peak
    memory stays the same. The function sets two thresholds of glibc's `malloc` to their largest
    values. It does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 32 << 20)
