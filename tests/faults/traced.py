"""Run a command of the project in this process, after strace has been attached to it.

Unique names are numbered from 1, so that two runs of a command use the same paths.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import time
import uuid
from pathlib import Path


def wait_for_tracer() -> None:
    """Return when a tracer is attached to this process."""
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.005)
    time.sleep(0.02)


if __name__ == "__main__":
    numbers = itertools.count(1)
    uuid.uuid4 = lambda: uuid.UUID(int=next(numbers))
    sys.argv = sys.argv[1:]
    if os.environ.pop("TRACED", ""):
        wait_for_tracer()
    if Path(sys.argv[0]).name == "prepare_data.py":
        from megatron.data.prepare import chunks

        chunks.CHUNK_BYTES = 1 << 13  # a short text then has several chunks
    runpy.run_path(sys.argv[0], run_name="__main__")
