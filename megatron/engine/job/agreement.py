"""Checks that all ranks of a job use the same configuration, text and folders.

Each machine has its own copy of the first two. If the copies differed, nothing would stop the job:
the ranks would train different models, or on different samples.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.config import Config
from megatron.engine.errors import CheckpointError, StartError
from megatron.parallel.groups import Groups

Seen = TypeVar("Seen")
LOCAL = ("data", "logging")
"""Sections of the config whose paths may differ between machines."""
PATIENCE = 75
"""Seconds until a network file system shows on one machine what another has written: NFS caches a
folder for 60 by default (acdirmax)."""


def settings_of(config: Config) -> dict[str, Any]:
    """The config's values, without those that may differ between machines."""
    return {
        name: value
        for section, values in config.sections()
        if section not in LOCAL
        for name, value in values.model_dump().items()
    }


def require_agreement(groups: Groups, subject: str, values: Mapping[str, Any]) -> None:
    """Compare `values` over the ranks; every rank must call it.

    Raises:
        StartError: names the first rank that differs from rank 0, and the values.
    """
    first, *others = groups.gather_from_job((socket.gethostname(), dict(values)))
    for rank, (host, theirs) in enumerate(others, start=1):
        differing = [
            f"{key}: {theirs.get(key)!r} there, {first[1].get(key)!r} here"
            for key in first[1] | theirs
            if theirs.get(key) != first[1].get(key)
        ]
        if differing:
            raise StartError(
                f"rank {rank} on {host} has another {subject} than rank 0 on {first[0]} "
                f"({'; '.join(differing)}); give all machines the same"
            )


def require_one_folder(groups: Groups, folder: Path) -> None:
    """Check that every rank sees in `folder` what rank 0 writes there; every rank must call it.

    Raises:
        CheckpointError: names a rank that does not see it.
    """
    if groups.world_size == 1:
        return
    mark, text = folder / ".seen-by-all", uuid.uuid4().hex
    if groups.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(text)
    try:
        seen_by_all(
            lambda: mark.read_text() if mark.is_file() else None,
            folder,
            groups,
            expected=groups.gather_from_job(text)[0],
        )
    finally:
        if groups.is_main:
            mark.unlink(missing_ok=True)


def seen_by_all(
    look: Callable[[], Seen], folder: Path, groups: Groups, *, expected: Seen | None = None
) -> Seen:
    """The result of `look`, once it is the same on every rank; every rank must call it.

    Args:
        look: reads something in `folder`.
        expected: the result to wait for; None waits for the result of rank 0.

    Raises:
        CheckpointError: a rank still has another result after PATIENCE seconds.
    """
    until = time.monotonic() + PATIENCE
    while True:
        views = groups.gather_from_job((socket.gethostname(), look(), time.monotonic() > until))
        main, first, over = views[0]
        wanted = first if expected is None else expected
        other = [n for n, (_, view, _) in enumerate(views) if view != wanted]
        if not other:
            return wanted
        if over:
            raise CheckpointError(
                f"{folder} is not the same folder everywhere: rank {other[0]} on "
                f"{views[other[0]][0]} does not see in it what rank 0 on {main} sees; name a "
                "folder that all machines share"
            )
        time.sleep(1)
