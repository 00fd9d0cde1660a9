"""Files that appear complete or not at all: written under a temporary name, flushed, renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; at the end of the block it becomes `path`.

    If the block raises, `path` is as before and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of `path`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def flush(path: Path) -> None:
    """fsync a file or a folder, so that a rename never outlives the bytes that it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
