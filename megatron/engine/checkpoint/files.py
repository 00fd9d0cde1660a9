"""Folders that appear whole or not at all, among them every checkpoint.

A folder is written as `.unfinished-NAME`, flushed to disk, renamed, and only then named by the file
`latest` beside it (itself replaced by a rename). An older folder of the same name is put aside
first and deleted last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED, REPLACED = ".unfinished-", ".replaced-"


@contextmanager
def appears_whole(folder: Path, tag: str) -> Iterator[Path]:
    """A new folder to be filled, that becomes `folder/tag` and is named by `latest` in the end."""
    unfinished = folder / f"{UNFINISHED}{tag}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    publish(folder, tag)


def publish(folder: Path, tag: str) -> None:
    """Flush `.unfinished-TAG` to disk, rename it, and let `latest` name it."""
    unfinished, final = folder / f"{UNFINISHED}{tag}", folder / tag
    for path in (*unfinished.rglob("*"), unfinished):
        _flush(path)
    aside = folder / f"{REPLACED}{tag}"
    if final.exists():
        final.rename(aside)
    unfinished.rename(final)
    _flush(folder)
    _replace_text(folder / "latest", tag)
    shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(folder: Path) -> list[str]:
    """Delete what a killed run left half written or half replaced; returns the names."""
    for aside in folder.glob(f"{REPLACED}*"):
        final = folder / aside.name.removeprefix(REPLACED)
        if not final.exists():  # killed between the two renames: the old one is still the newest
            aside.rename(final)
    leftovers = sorted([*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REPLACED}*")])
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in leftovers]


def why_not_written(folder: Path, error: Exception) -> str:
    """What stopped a write into `folder`, and how much space is left there."""
    why = str(error) or type(error).__name__
    if "inline_container" in why or "PytorchStreamWriter" in why:
        why = "a file could not be written to its end"  # torch tells byte counts alone
    while not folder.exists():
        folder = folder.parent
    return f"{why}; {shutil.disk_usage(folder).free / 1e6:,.0f} MB are free there"


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".unfinished")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """fsync a file or a folder, so that a rename never outlives the bytes it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
