"""Errors that the user can correct end in one message and exit code 1, without a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.attention import AttentionError
from megatron.config import ConfigError
from megatron.data.errors import DataError
from megatron.engine.errors import CheckpointError, DivergedError, RunLogError, StartError
from megatron.engine.job import failure
from megatron.entry import NOBODY_READS, output_has_no_reader
from megatron.positional import PositionalError

USER_ERRORS = (
    AttentionError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    OSError,  # a full disk, a folder without permission: the text names the path
    PositionalError,
    RunLogError,
    StartError,
)


@dataclass
class Outcome:
    """Exit code of the work done under `user_errors`."""

    code: int = 0


@contextmanager
def user_errors() -> Iterator[Outcome]:
    """Print the message of a user error; any other error is a bug and passes through.

    In a job of several processes any error ends all of them; see `failure`.
    """
    outcome = Outcome()
    try:
        yield outcome
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and output_has_no_reader():
            if failure.is_member():
                failure.end_process("error: nobody reads the output any more", code=NOBODY_READS)
            raise  # `entry.run` handles it
        if failure.is_member():
            lost = failure.lost_contact(error)
            failure.end_process(failure.LOST_TEXT if lost else _message(error), lost=lost)
        if not isinstance(error, USER_ERRORS):
            raise
        print(_message(error), file=sys.stderr)
        outcome.code = 1


def _message(error: BaseException) -> str:
    if isinstance(error, USER_ERRORS):
        return f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "".join(traceback.format_exception(error)).rstrip()
