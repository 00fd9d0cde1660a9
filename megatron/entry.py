"""Shared by all commands: parsing arguments, reporting errors, and ending with an exit code.

A command ends silently if nobody reads its output.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

# OpenMP's threads spin while they wait. On a machine that does anything else besides, a training
# step then takes up to ten times as long; sleeping costs nothing measurable. Read by the OpenMP
# library when torch is first imported, so every command imports this module first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NOBODY_READS = 141
"""Exit code where the reader of the output has gone: a shell's word for SIGPIPE (128 + 13)."""


def run(main: Callable[[], int]) -> NoReturn:
    """Exit with what `main` returns.

    `train.py CONFIG --check | head -1` ends quietly. The signal's default action, death at the
    first write, would do it too, but for every broken socket of a training job as well.
    """
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse has printed its help
            code = end.code
            if not code and output_has_no_reader():  # which some of its versions do not mind
                code = NOBODY_READS
        if sys.stdout and not sys.stdout.closed:  # None where it was started without (`>&-`)
            sys.stdout.flush()
    except BrokenPipeError as error:
        code = NOBODY_READS
        if not output_has_no_reader():  # another pipe
            print(f"error: {error}", file=sys.stderr)
            code = 1
    if output_has_no_reader():  # what is left in the buffer is flushed once more, at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if "triton" not in sys.modules:  # newer ones would list all that is left of them
        gc.freeze()  # nothing is left to collect, and to look for it takes 50 ms
    sys.exit(code)


Arguments = ParamSpec("Arguments")


def reports(*known: type[Exception]) -> Callable[..., Callable[Arguments, int]]:
    """Decorate a `main`: a known error, or an OSError, becomes one message and exit code 1."""

    def decorate(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
        @wraps(main)
        def reporting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except (OSError, *known) as error:
                if isinstance(error, BrokenPipeError):
                    raise  # to `run`
                print(f"error: {error}", file=sys.stderr)
                return 1

        return reporting

    return decorate


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of arguments whose `--help` shows `description` with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def output_has_no_reader() -> bool:
    """Whether stdout is a pipe whose other end is closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, it stands for no file, is closed
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
