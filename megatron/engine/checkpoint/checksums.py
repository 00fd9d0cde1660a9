"""Record the sizes and checksums of a checkpoint's files; verify the files before loading.

`kerple.json` is written last. It contains the size and the CRC-32 of every other file, and the
CRC-32 of its own content. A CRC-32 finds incomplete writes and flipped bits, but not forgery. All
ranks see the same folder, so each rank computes the checksums of some of the files.
"""

import json
import zlib
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megatron.files import parse_json, read_small
from megatron.parallel.groups import Groups
from megatron.run_folder import RECORD
from megatron.version import __version__

FORMAT = 1
"""The version of the format of `kerple.json`.

The version is raised whenever the format changes so much that older code would misread the file.
"""
MOST_BYTES = 1 << 27
"""The largest size of a `kerple.json` that is read, in bytes."""
READ_BYTES = 1 << 24
"""The number of bytes to read from a file at a time."""


def sealed(record: dict[str, Any]) -> str:
    """Return `record` and its CRC-32 as JSON text."""
    # The new entry `checksum` is the CRC-32 of the other entries.
    return json.dumps(record | {"checksum": _seal(record)}, indent=1)


def write_record(folder: Path, record: Mapping[str, Any], files: Mapping[str, list[int]]) -> None:
    """Write the file `kerple.json` into a checkpoint's folder.

    Args:
        record: The description of the run.
        files: Maps the path of each other file to [size in bytes, CRC-32].
    """
    # `kerple.json` is the last file of a checkpoint, so that it marks the checkpoint as complete.
    versions = {"format": FORMAT, "version": __version__}
    (folder / RECORD).write_text(sealed({**versions, **record, "files": files}))


def describe_files(folder: Path, groups: Groups) -> dict[str, list[int]]:
    """Return a dict from the path of each file in `folder` to [size in bytes, CRC-32]."""
    # `kerple.json` itself is left out. Every rank must call this function.
    files = (path for path in folder.rglob("*") if path.is_file())
    listed = [each for path in files if (each := path.relative_to(folder).as_posix()) != RECORD]
    # A network file system may show one machine a file later than another.
    names = sorted({name for each in groups.gather_from_job(listed) for name in each})
    mine = names[groups.rank :: groups.world_size]
    local = {name: [(folder / name).stat().st_size, _checksum(folder / name)] for name in mine}
    return {name: found for each in groups.gather_from_job(local) for name, found in each.items()}


def damage(folder: Path, groups: Groups, skipped: str = "") -> str | None:
    """Return a text that names a damaged file and its damage, or None if all files are intact.

    Every rank must call this function, and every rank gets the same result.

    Args:
        folder: The folder of one checkpoint.
        skipped: A pattern of file names that are not checked, such as `*optim_states.pt`.
    """
    # If several files are damaged, the text describes the file whose path sorts first.
    problem = _damage_seen_by(folder, groups.rank, groups.world_size, skipped)
    return min((found for found in groups.gather_from_job(problem) if found), default=None)


def _damage_seen_by(folder: Path, rank: int, ranks: int, skipped: str) -> str | None:
    """Check this rank's share of the files. Return a text about the first damage, or None."""
    # `kerple.json` is checked, too.
    path = folder / RECORD
    try:
        record = parse_json(read_small(path, MOST_BYTES))
        if record.get("format", 0) > FORMAT:
            return None  # intact for all that this code knows: `Record.read` names the versions
        sealed_by = record.pop("checksum", None)
        if sealed_by is None and not record.keys().isdisjoint(("format", "files")):
            return f"{path}: its checksum is missing"
        if sealed_by is not None and sealed_by != _seal(record):
            return f"{path}: its checksum is wrong"
        for name, (size, checksum) in sorted(record.get("files", {}).items())[rank::ranks]:
            if fnmatch(name, skipped):
                continue
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
