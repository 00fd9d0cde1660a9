"""Read plain, gzip, zstandard, xz and bzip2 files as byte streams that report truncation.

`CountedFile` computes the SHA-256 of a file while the file is read, so the file need not be read a
second time.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
# Most archives need a window of 8 MiB, but `--long` archives need up to 2 GiB.
_ZSTD = partial(zstd.open, options={zstd.DecompressionParameter.window_log_max: 31})
_OPEN: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".zst": _ZSTD}
_OPEN |= {".xz": lzma.open, ".bz2": bz2.open}
_BUFFER = 1 << 20


class CountedFile(io.FileIO):
    """A file that computes its SHA-256 while it is read from start to end."""

    # These call `readinto`, and those of FileIO do not.
    read = io.RawIOBase.read  # pyright: ignore[reportAssignmentType]  nobody passes None
    readall = io.RawIOBase.readall

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        self._sha256 = hashlib.sha256()

    def readinto(self, buffer: memoryview) -> int:
        count = super().readinto(buffer)
        self._sha256.update(memoryview(buffer)[:count])
        return count

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the complete file, after reading the rest of the file."""
        read_out(self)
        return self._sha256.hexdigest()


class _Counted(io.RawIOBase):
    """A stream that calls a function after each read with the number of bytes that were read."""

    def __init__(self, stream: Any, count: Callable[[int], None]) -> None:
        # The read at the end of a truncated file fails and loses its data, so reads are small.
        self._read = getattr(stream, "readinto1", None) or stream.readinto
        self._count = count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        size = self._read(buffer)
        self._count(size)
        return size


def decompressed(
    name: str, source: io.RawIOBase | IO[bytes], count: Callable[[int], None]
) -> io.BufferedReader:
    """Return the decompressed content of `source` as a buffered stream.

    Args:
        name: The name of the file. Its suffix determines the compression.
        count: A function that is called after each read with the number of decompressed bytes that
            the read returned.
    """
    # A read from this stream returns fewer bytes than requested only at the end of the stream. If
    # the suffix is unknown, the content of `source` is returned unchanged. `count` may raise an
    # error, for example if the total is too large.
    stream, suffix = cast(Any, source), Path(name.lower()).suffix
    if suffix in _OPEN:
        stream = _OPEN[suffix](stream)
    return io.BufferedReader(_Counted(stream, count), _BUFFER)


def read_block(stream: io.BufferedReader, size: int) -> tuple[bytes, Exception | None]:
    """Read `size` bytes, or fewer if the stream ends or is damaged.

    Returns:
        (bytes, error), where `error` is None if the stream is not damaged.
    """
    pieces, missing = [], size
    while missing:
        try:
            piece = stream.read1(missing)
        except Exception as error:  # the libraries raise more types than they document
            return b"".join(pieces), error
        if not piece:
            break
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces), None


def hash_file(path: str | os.PathLike) -> str:
    """Return the SHA-256 (hex) of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_out(stream: io.RawIOBase | io.BufferedIOBase) -> None:
    """Read `stream` to its end and discard the data."""
    while stream.read(_BUFFER):  # the last read checks the checksum at the end of the file
        pass
