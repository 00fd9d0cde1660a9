"""Long commands that run beside the other tests: started with the session, awaited by their test.

Most tests use one core, so a command on the other core costs the session little time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.paths import ROOT

_FOLDER = tempfile.TemporaryDirectory()
COMPILED = Path(_FOLDER.name) / "compiled.csv"
"""The table that the command of `test_a_dozen_variants_compile_and_spill_nothing` writes."""
COMMANDS = {
    "test_the_types_are_right": ["-m", "basedpyright", "--pythonpath", sys.executable],
    "test_a_dozen_variants_compile_and_spill_nothing": [
        "tools/compile_kernels.py", "--sample", "--out", str(COMPILED)
    ],
}  # fmt: skip
"""Test name -> arguments of Python, run in the root of the checkout without the interpreter."""
_started: dict[str, subprocess.Popen] = {}


def start(tests: Iterable[str]) -> None:
    """Start the commands of the tests that have one."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for test in COMMANDS.keys() & set(tests) - _started.keys():
        output = open(Path(_FOLDER.name) / test, "w+")  # noqa: SIM115, a pipe could fill up
        _started[test] = subprocess.Popen(
            [sys.executable, *COMMANDS[test]],
            cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def result(test: str) -> tuple[int, str]:
    """Wait for the command of `test`; return its exit code and its output."""
    start([test])
    code = _started[test].wait()
    return code, (Path(_FOLDER.name) / test).read_text()
