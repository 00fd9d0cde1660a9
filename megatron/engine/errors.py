"""Errors that a user can mend end in one clear message and exit code 1, not in a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.attention import AttentionError
from megatron.config import ConfigError
from megatron.data.errors import DataError
from megatron.engine.log import RunLogError
from megatron.engine.loop import DivergedError
from megatron.engine.safe_load import CheckpointError


@dataclass
class Outcome:
    """Exit code of the work done under `user_errors`."""

    code: int = 0


@contextmanager
def user_errors() -> Iterator[Outcome]:
    """Print the message of an error that the user can mend; anything else is a bug and passes."""
    outcome = Outcome()
    mendable = (
        AttentionError,
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        RunLogError,
    )
    try:
        yield outcome
    except mendable as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        outcome.code = 1
