"""Keep freed memory in the process, which makes training on a CPU faster."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _FROM_HEAP = 1 << 30, 1 << 25
"""The most bytes that are kept, and the size up to which an allocation comes from them."""


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, and return whether it does.

    A training step allocates as much as it frees. Memory that went back to the kernel returns page
    by page, each of them cleared, which took a sixth of the processor time of a small model's step.
    If the user has set glibc's own variables, or the C library is not glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & set(
        os.environ
    )
    if mallopt is None or chosen:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT) and mallopt(_MMAP_THRESHOLD, _FROM_HEAP))
