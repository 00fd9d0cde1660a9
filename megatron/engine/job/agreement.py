"""Check that all ranks of a job use the same configuration, text and folders.

Each machine has its own copy of the configuration and of the text. If the copies differed and were
not compared, the ranks would train different models, or train on different samples.
"""

import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.config import Config
from megatron.engine.errors import CheckpointError, StartError
from megatron.parallel.groups import Groups

Seen = TypeVar("Seen")
LOCAL = ("data", "logging")
"""The sections of the config whose values may differ between machines, because they hold paths."""
PATIENCE = 75
"""The longest wait, in seconds, until a machine sees what another wrote to a network file system.

NFS caches a folder for 60 seconds by default (its option `acdirmax`).
"""


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings of `config` as a dict, without the keys about data and logging."""
    return {
        name: value
        for section, values in config.sections()
        if section not in LOCAL
        for name, value in values.model_dump().items()
    }


def require_agreement(groups: Groups, subject: str, values: Mapping[str, Any]) -> None:
    """Check that `values` are the same on all ranks. Every rank must call this function.

    Args:
        subject: The name of the values in the error message, such as "config".
        values: This rank's values.

    Raises:
        StartError: The values of some rank differ from those of rank 0. The error message names
            that rank and the values that differ.
    """
    first, *others = groups.gather_from_job((socket.gethostname(), dict(values)))
    for rank, (host, theirs) in enumerate(others, start=1):
        if theirs == first[1]:
            continue
        differing = [
            f"{key}: {theirs.get(key)!r} there, {first[1].get(key)!r} here"
            for key in first[1] | theirs
            if theirs.get(key) != first[1].get(key)
        ]
        raise StartError(
            f"rank {rank} on {host} has another {subject} than rank 0 on {first[0]} "
            f"({'; '.join(differing)}); give all machines the same"
        )


def seen_by_all(look: Callable[[], Seen], folder: Path, groups: Groups) -> Seen:
    """Call `look` until it returns the same value on every rank, and return that value.

    Every rank must call this function.

    Args:
        look: A function that reads `folder`, and returns for example the names of its files.
        folder: The folder that error messages name.

    Raises:
        CheckpointError: The ranks still disagree after PATIENCE seconds.
    """
    until = time.monotonic() + PATIENCE
    while True:
        views = groups.gather_from_job((socket.gethostname(), look(), time.monotonic() > until))
        main, first, over = views[0]
        other = [n for n, (_, view, _) in enumerate(views) if view != first]
        if not other:
            return first
        if over:
            raise CheckpointError(
                f"{folder} is not the same folder everywhere: rank {other[0]} on "
                f"{views[other[0]][0]} sees other files in it than rank 0 on {main}; name a "
                "folder that all machines share"
            )
        time.sleep(1)
