"""How the commands of data preparation end: exit code and message."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron import entry
from megatron.data.errors import DataError

INTERRUPTED = 130
"""Exit code after Ctrl-C: a shell's code for SIGINT (128 + 2)."""


def exit_code(command: Callable[[], int]) -> int:
    """Run `command`; print an error that the user can correct, without a traceback.

    Returns:
        What `command` returns; 1 after an error, 130 after Ctrl-C.
    """
    try:
        return entry.reports(DataError)(command)()
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
