"""Run scripts of this folder in forks of one process that has imported what they need.

    python tests/ptx/forked.py

Each line of stdin is a JSON list of a script and its options. The answer is a line with a JSON list
of the script's exit code and of what it printed. New processes would take 4 s each for imports.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import sys
import tempfile

import torch._inductor  # noqa: F401  torch imports it when it traces the first formula

import megatron.attention.fused  # noqa: F401
from tests.ptx import verify_terms  # noqa: F401


def run_here(argv: list[str], output: int) -> None:
    """Run `python argv...` in this process; it prints to a file descriptor."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def run(argv: list[str]) -> tuple[int | None, str]:
    """Return the exit code of `python argv...` and what it printed."""
    with tempfile.TemporaryFile("w+") as output:
        process = multiprocessing.get_context("fork").Process(
            target=run_here, args=(argv, output.fileno())
        )
        process.start()
        process.join()
        output.seek(0)
        return process.exitcode, output.read()


if __name__ == "__main__":
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
