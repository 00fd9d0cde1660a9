"""Run a data preparation command and turn its errors into error messages and exit codes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from megatron import entry
from megatron.data.errors import DataError
from megatron.preemption import SIGNALS


def exit_code(command: Callable[[], int]) -> int:
    """Run `command` and return the exit code of the process.

    Returns:
        The return value of `command`; or 1 after a DataError or OSError (its message is printed
        without a traceback); or 130 after Ctrl-C, SIGTERM or SIGUSR1.
    """
    for number in {*SIGNALS} - {signal.SIGINT}:  # which a shell's background jobs ignore
        signal.signal(number, signal.default_int_handler)
    try:
        return entry.reports(DataError)(command)()
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return entry.INTERRUPTED
