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
from megatron.engine.distributed import StartError
from megatron.engine.log import RunLogError
from megatron.engine.loop import DivergedError
from megatron.engine.safe_load import CheckpointError
from megatron.positional import PositionalError


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
        OSError,  # a full disk, a folder without permission: the text names the path
        PositionalError,
        RunLogError,
        StartError,
    )
    try:
        yield outcome
    except mendable as error:
        rank = os.environ.get("RANK", "0")
        who = "" if rank == "0" else f"rank {rank}: "
        print(f"{who}error: {error}", file=sys.stderr)
        outcome.code = 1
