"""Checkpoint folders: each appears complete or not at all, and records checksums of its files.

A folder is written as `.unfinished-NAME`, flushed to disk and renamed. Only then does the file
`latest` beside it name it. An older folder of the same name is renamed first and deleted last.

`kerple.json` is written last. It holds the size and the CRC-32 of every other file, and of itself.
CRC-32 finds torn writes and flipped bits, not forgery. All ranks see one folder, so they divide the
files among themselves to compute checksums.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.files import flush, write_text
from megatron.parallel.groups import Groups

RECORD = "kerple.json"
UNFINISHED, REPLACED = ".unfinished-", ".replaced-"
READ_BYTES = 1 << 24
"""Bytes read at a time."""


@contextmanager
def new_folder(folder: Path, tag: str) -> Iterator[Path]:
    """Yield an empty folder. At the end of the block it becomes `folder/tag`, and `latest`."""
    yield create_unfinished(folder, tag)
    publish(folder, tag)


def create_unfinished(folder: Path, tag: str) -> Path:
    """Create the empty folder that `publish` renames."""
    unfinished = folder / f"{UNFINISHED}{tag}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def publish(folder: Path, tag: str) -> None:
    """Flush `.unfinished-TAG` to disk, rename it, and write its name into `latest`."""
    unfinished, final = folder / f"{UNFINISHED}{tag}", folder / tag
    for path in (*unfinished.rglob("*"), unfinished):
        flush(path)
    replaced = folder / f"{REPLACED}{tag}"
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    flush(folder)
    write_text(folder / "latest", tag)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_unfinished(folder: Path) -> list[str]:
    """Delete what a killed run left half written or half replaced, and return the names."""
    for replaced in folder.glob(f"{REPLACED}*"):
        final = folder / replaced.name.removeprefix(REPLACED)
        if not final.exists():  # killed between the two renames: the old one is still the newest
            replaced.rename(final)
    leftovers = sorted([*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REPLACED}*")])
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in leftovers]


def why_not_written(folder: Path, error: Exception) -> str:
    """The reason why a write into `folder` failed, and the space that is left there."""
    why = str(error) or type(error).__name__
    if "inline_container" in why or "PytorchStreamWriter" in why:
        why = "a file could not be written to its end"  # torch reports only byte counts
    while not folder.exists():
        folder = folder.parent
    return f"{why}; {shutil.disk_usage(folder).free / 1e6:,.0f} MB are free there"


def sealed(record: dict[str, Any]) -> str:
    """The record as JSON, with its own checksum added."""
    return json.dumps(record | {"checksum": _seal(record)}, indent=1)


def describe_files(folder: Path, groups: Groups) -> dict[str, list[int]]:
    """File name -> [bytes, checksum] of all files in `folder`; every rank must call it."""
    listed = [path.name for path in folder.iterdir() if path.name != RECORD]
    # A network file system may show one machine a file later than another.
    names = sorted({name for each in groups.gather_from_job(listed) for name in each})
    mine = names[groups.rank :: groups.world_size]
    local = {name: [(folder / name).stat().st_size, _checksum(folder / name)] for name in mine}
    return {name: found for each in groups.gather_from_job(local) for name, found in each.items()}


def damage(folder: Path, groups: Groups) -> str | None:
    """The first file of a checkpoint that differs from what was written, and how.

    Every rank must call it. All ranks get the same answer: None if every file is intact.
    """
    problem = _damage_seen_by(folder, groups.rank, groups.world_size)
    return min((found for found in groups.gather_from_job(problem) if found), default=None)


def _damage_seen_by(folder: Path, rank: int, ranks: int) -> str | None:
    """Check the record, and every file of this rank's share."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text())
        if "checksum" in record and record.pop("checksum") != _seal(record):
            return f"{path}: its checksum is wrong"
        for name, (size, checksum) in sorted(record.get("files", {}).items())[rank::ranks]:
            path = folder / name
            if not path.is_file():
                return f"{path}: missing"
            if (found := path.stat().st_size) != size:
                return f"{path}: has {found:,} bytes, but {size:,} were written"
            if _checksum(path) != checksum:
                return f"{path}: its checksum is wrong, so some of its bytes have changed"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{path}: cannot be read ({error})"
    return None


def _seal(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while content := file.read(READ_BYTES):
            value = zlib.crc32(content, value)
    return value
