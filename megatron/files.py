"""Write files atomically, read files of unknown origin, and parse JSON.

An atomic write creates a temporary file, flushes it to disk, and then renames it.
"""

import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

UNFINISHED = ".unfinished"
# The bytes that `read_small` reads beyond a file's size, because a file may be growing.
_GROWTH = 1 << 16


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a temporary file. After the `with` block, rename this file to `path`.

    If the block raises an exception, `path` is left unchanged and the temporary file is removed.
    """
    # Processes of several machines or containers may have the same id.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
    try:
        with naming(path):
            yield temporary
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """Yield a path of the existing `folder` for programs that read paths as patterns.

    If the path has characters such as `*`, `[` or `+`, it is that of a temporary link.
    """

    def plain(path: object) -> bool:
        return not re.search(r"[][*?+(){}^$|\\]", str(path))

    if plain(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=None if plain(tempfile.gettempdir()) else "/tmp") as place:
        link = Path(place) / "link"
        link.symlink_to(folder.resolve())
        yield link


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name `path` to an OSError of the `with` block that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Atomically replace the content of the file `path` with `text`, encoded as UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Atomically replace the content of the file `path` with `content`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def replace_table(path: Path, content: bytes | None) -> None:
    """Atomically replace the table in the file `path`, or remove the file.

    If the earlier file has other content, it is kept under the name `NAME.previous`.

    Args:
        content: The new content. None removes the file.
    """
    old = read_small(path, 1 << 30) if path.exists() else None
    if old is not None and old != content:
        write_bytes(path.with_name(f"{path.name}.previous"), old)
    if content is None:
        path.unlink(missing_ok=True)
    else:
        write_bytes(path, content)


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a small file of unknown origin.

    Args:
        most: The largest accepted size of the file, in bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or has more than `most` bytes.
    """
    # Reading a named pipe would wait for ever.
    with open(path, "rb", opener=without_waiting) as file:
        found = os.fstat(file.fileno())
        if not S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if found.st_size > most:
            raise OSError(f"has {found.st_size:,} bytes, and at most {most:,} are read")
        return file.read(min(most, found.st_size + _GROWTH))


def read_at_most(file: BinaryIO, most: int) -> bytes:
    """Return the rest of a stream of unknown origin, which may be endless.

    Args:
        most: The largest accepted size of the rest, in bytes.

    Raises:
        OSError: The stream cannot be read, or its rest has more than `most` bytes.
    """
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"has more than {most:,} bytes, and at most {most:,} are read")
    return content


def read_start(path: Path, most: int = 4096) -> str:
    """Return the first `most` bytes of a file as text. For a named pipe, return ""."""
    with open(path, "rb", opener=without_waiting) as file:
        return file.read(most).decode(errors="replace")


def without_waiting(path: str, flags: int) -> int:
    """Open a file as `os.open` does, but without waiting for the other end of a named pipe.

    The built-in function `open` accepts this function as its argument `opener`.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def existing(folder: Path) -> Path:
    """Return `folder` if it exists, or its nearest ancestor that exists.

    The ancestor may be a file.
    """
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def why_unwritable(folder: Path) -> str:
    """Return the reason why no file can be written into the existing folder `folder`.

    If a file can be written, return "".
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"cannot be written, {error.strerror}"
    return ""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text of unknown origin, and return its value.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or contains an integer with too many
            digits.
    """
    # Python converts 4300 digits by default.
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def flush(path: Path) -> None:
    """Flush a file or a folder to disk with fsync."""
    # To be called before a file is renamed. Otherwise, a crash could leave an incomplete file under
    # the new name.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
