"""What a checkpoint's files should be: their sizes and checksums, written last and checked first.

The checksum is CRC-32: it finds torn writes and flipped bits, not forgery. Ranks share the files
out, since all see one folder.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from megatron.parallel import Groups

RECORD = "kerple.json"
PIECE = 1 << 24
"""Bytes read at a time."""


def describe_files(folder: Path, groups: Groups) -> dict[str, list[int]]:
    """File name -> [bytes, checksum], of all files in `folder`; every rank must call it."""
    seen = [path.name for path in folder.iterdir() if path.name != RECORD]
    # A network file system may list to one machine what another has written only later.
    names = sorted({name for each in groups.gather_from_job(seen) for name in each})
    mine = names[groups.rank :: groups.world_size]
    own = {name: [(folder / name).stat().st_size, _checksum(folder / name)] for name in mine}
    return {name: found for each in groups.gather_from_job(own) for name, found in each.items()}


def damage(folder: Path, groups: Groups) -> str | None:
    """The first file of a checkpoint that is not as it was written, and why; None if all are.

    Every rank must call it; all get the same answer.
    """
    own, files = None, []
    try:
        record = json.loads((folder / RECORD).read_text())
        if "checksum" in record and record.pop("checksum") != _seal(record):
            own = f"{folder / RECORD}: its checksum is wrong"
        else:
            files = sorted(record.get("files", {}).items())
    except (OSError, ValueError, AttributeError) as error:
        own = f"{folder / RECORD}: cannot be read ({error})"
    for name, (size, checksum) in files[groups.rank :: groups.world_size]:
        own = own or _problem(folder / name, size, checksum)
    return min((found for found in groups.gather_from_job(own) if found), default=None)


def sealed(record: dict[str, Any]) -> str:
    """The record as JSON, with its own checksum in it."""
    return json.dumps(record | {"checksum": _seal(record)}, indent=1)


def _seal(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _problem(path: Path, size: int, checksum: int) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    found = path.stat().st_size
    if found != size:
        return f"{path}: has {found:,} bytes, but {size:,} were written"
    try:
        same = _checksum(path) == checksum
    except OSError as error:
        return f"{path}: cannot be read ({error})"
    return None if same else f"{path}: its checksum is wrong, so some of its bytes have changed"


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return value
