"""Shared by all commands: the Python they need, their arguments, and how they end.

Every command imports this module before any other of this repository. Python 3.6 must be able to
parse it, so that an older Python gets a message and not a syntax error.
"""

import argparse
import gc
import os
import select
import sys
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

OLDEST = (3, 11)
if sys.version_info < OLDEST:
    needed, found = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
    sys.exit(
        f"error: Python {needed} or newer is needed, but {sys.executable} is Python {found}; "
        f"start the command with a newer one, e.g. python{needed}"
    )

# OpenMP's threads spin while they wait. If the machine does anything else, a training step then
# takes up to ten times as long; sleeping costs nothing measurable. The OpenMP library reads the
# variable when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NOBODY_READS = 141
"""Exit code if the reader of the output has gone: a shell's code for SIGPIPE (128 + 13)."""


def run(main: "Callable[[], int]") -> "NoReturn":
    """Exit with what `main` returns, quietly if nobody reads its output any more.

    `train.py CONFIG --check | head -1` ends quietly. The signal's default action, to die at the
    first write, would also end a training job at every broken socket.
    """
    try:
        try:
            code = main()
        except SystemExit as end:  # from argparse, which has printed its help, or from `refuse`
            code = end.code
            if not code and output_has_no_reader():  # some versions of argparse ignore it
                code = NOBODY_READS
        if sys.stdout and not sys.stdout.closed:  # None if the command started without it (`>&-`)
            sys.stdout.flush()
    except BrokenPipeError as error:
        code = NOBODY_READS
        if not output_has_no_reader():  # another pipe is broken
            print(f"error: {error}", file=sys.stderr)
            code = 1
    if output_has_no_reader():  # Python flushes the rest of the buffer at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if "triton" not in sys.modules:  # newer versions would list everything that is left of them
        gc.freeze()  # nothing is left to collect, and looking for it takes 50 ms
    sys.exit(code)


def refuse(text: str, code: int) -> "NoReturn":
    """Print why the command does nothing, and exit; a process of a job ends the complete job."""
    if "RANK" in os.environ:
        from megatron.engine.job import failure

        if failure.is_member():
            failure.end_process(text, code=code)
    print(text, file=sys.stderr)
    sys.exit(code)


def reports(*known: "type[Exception]") -> "Callable[[Callable[..., int]], Callable[..., int]]":
    """Decorate a `main`: a known error, or an OSError, becomes one message and exit code 1."""

    def decorate(main: "Callable[..., int]") -> "Callable[..., int]":
        @wraps(main)
        def reporting(*args: object, **kwargs: object) -> int:
            try:
                return main(*args, **kwargs)
            except (OSError, *known) as error:
                if isinstance(error, BrokenPipeError):
                    raise  # to `run`
                print(f"error: {error}", file=sys.stderr)
                return 1

        return reporting

    return decorate


def parser(description: "str | None") -> argparse.ArgumentParser:
    """A parser of arguments whose `--help` shows `description` with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def output_has_no_reader() -> bool:
    """Whether stdout is a pipe whose other end is closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # no stdout, one without a file, a closed one
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
