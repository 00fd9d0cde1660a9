"""Writes that outlive a power cut: nothing is named before its bytes are on the disk."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path`, which holds the old text or the new at every moment."""
    temporary = path.with_name(path.name + ".unfinished")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """fsync a file or a folder, so that a rename never outlives the bytes it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
