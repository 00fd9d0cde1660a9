"""Code that all commands share: the check of Python's version, argument parsing, and exit codes.

Every command imports this module before any other module of this repository. This file avoids
syntax newer than Python 3.6, so that an old Python prints a clear error message instead of a
syntax error.
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
    from types import TracebackType
    from typing import NoReturn

OLDEST = (3, 11)
if sys.version_info < OLDEST:
    needed, found = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
    sys.exit(
        f"error: Python {needed} or newer is needed, but {sys.executable} is Python {found}; "
        f"start the command with a newer one, e.g. python{needed}"
    )

from megatron import cpu_settings  # noqa: E402  it needs a newer Python

cpu_settings.choose_waiting()  # every command imports torch after this module
# What the imports make stays until the end. With Python's 700, its searches for garbage among it
# take a sixth of the start.
gc.set_threshold(10_000)

NEEDED = ("pydantic", "yaml", "numpy", "torch", "deepspeed")
"""The packages without which no command can start."""


def say_what_is_missing(kind: type, error: BaseException, trace: "TracebackType | None") -> None:
    """Print how to install a missing package. Print any other uncaught error with its traceback.

    Python calls this function for uncaught errors (`sys.excepthook`).

    Args:
        kind: The class of the error.
        error: The error.
        trace: The traceback of the error.
    """
    # Only for the packages in `NEEDED`.
    if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
        print(
            f"error: {sys.executable} has no package {error.name}: activate the environment of "
            "this project (source .venv/bin/activate), or install it: "
            "python -m pip install -e . -c requirements.txt",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say_what_is_missing

NOBODY_READS = 141
"""Exit code when no process reads stdout any more: a shell's code for SIGPIPE (128 + 13)."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: a shell's code for SIGINT (128 + 2)."""


def run(main: "Callable[[], int]") -> "NoReturn":
    """Call `main`, and exit with the exit code that `main` returns."""
    # If the reader of stdout has exited, as in `train.py CONFIG --check | head -1`, the command
    # exits with the code `NOBODY_READS` (141) and prints no traceback. The signal SIGPIPE stays
    # ignored, as is Python's default. Otherwise any broken network connection would kill a training
    # job.
    try:
        try:
            code = main()
        except SystemExit as end:  # from argparse, which has printed its help, or from `refuse`
            code = end.code
            if not code and output_has_no_reader():  # some argparse versions hide the broken pipe
                code = NOBODY_READS
        if sys.stdout and not sys.stdout.closed:  # None if the command started without it (`>&-`)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError as error:
        code = NOBODY_READS if output_has_no_reader() else 1
        if code == 1:  # the broken pipe is not stdout
            print(f"error: {error}", file=sys.stderr)
    if output_has_no_reader():  # Python's flush of stdout at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if "triton" not in sys.modules:  # newer Triton would print a list of its objects still alive
        gc.freeze()  # skip the garbage collection at exit, which takes 50 ms and frees nothing
    sys.exit(code)


def refuse(text: str, code: int) -> "NoReturn":
    """Print why the command cannot run, and exit.

    If this process belongs to a distributed job, end all processes of the job.

    Args:
        text: The reason.
        code: The exit code.
    """
    from megatron.ending import end_job_of_this_process

    end_job_of_this_process(text, code=code)
    print(text, file=sys.stderr)
    sys.exit(code)


def reports(main: "Callable[..., int]") -> "Callable[..., int]":
    """Make a `main` function print errors that the user can fix, without a traceback.

    If `main` raises an OSError or a UserError, the decorated function prints `error: MESSAGE` and
    returns exit code 1.
    """
    from megatron.errors import USER_ERRORS

    @wraps(main)
    def reporting(*args: object, **kwargs: object) -> int:
        try:
            return main(*args, **kwargs)
        except USER_ERRORS as error:
            if isinstance(error, BrokenPipeError):
                raise  # to `run`, which handles it
            print(f"error: {error}", file=sys.stderr)
            return 1

    return reporting


def parser(description: "str | None") -> argparse.ArgumentParser:
    """Return an argument parser whose `--help` keeps the line breaks of `description`."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def number(
    kind: "type[int] | type[float]", low: float, high: float = float("inf")
) -> "Callable[[str], float]":
    """Return a function for argparse that converts text to a number from `low` to `high`.

    Args:
        kind: The type of the number, `int` or `float`.
        low: The smallest valid number.
        high: The largest valid number. By default, every finite number from `low` is valid.
    """

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}]")
        return value

    read.__name__ = kind.__name__  # argparse names it in errors
    return read


def assignment(text: str) -> "tuple[str, str]":
    """Split the text `NAME=VALUE` into the name and the value, for argparse."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: write NAME=VALUE")
    return name, value


def output_has_no_reader() -> bool:
    """Return whether stdout is a pipe whose read end is closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # no stdout, one without a file, a closed one
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
