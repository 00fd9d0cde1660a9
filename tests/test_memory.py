"""Test that freed memory stays in the process, where the next allocation finds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from megatron.memory import keep_freed_memory

kept = KEEP and keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def allocate():
    arrays = [np.empty(3 << 20, np.uint8) for _ in range(16)]
    for array in arrays:
        array.fill(1)

allocate()
before = faults()
allocate()
print(int(kept), faults() - before)
"""


@pytest.mark.parametrize(
    ("keep", "variables", "expected"),
    [(True, {}, True), (True, {"MALLOC_TRIM_THRESHOLD_": "131072"}, False), (False, {}, False)],
)
def test_memory_is_not_fetched_again(keep, variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = PROGRAM.replace("KEEP", str(keep))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, faults = map(int, done.stdout.split())
    assert kept == expected
    assert (faults < 1000) == expected, faults
