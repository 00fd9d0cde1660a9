"""Read plain, gzip, zstandard, xz and bzip2 files as byte streams that report truncation.

The `zstandard` library's `stream_reader` does not report that a file is truncated, and by default
it reads only the first of several frames. `ZstdStream` reports truncation and reads all frames.
`CountedFile` counts and hashes the bytes of a file while they are read, so a file that is read for
its text need not be read again for its SHA-256.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import zstandard

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_STANDARD = {".gz": gzip.open, ".tgz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_READ = 1 << 16  # number of compressed bytes read at a time
_BUFFER = 1 << 20


class _Readable(io.RawIOBase):
    def readable(self) -> bool:
        return True


class CountedFile(_Readable):
    """A file that counts and hashes its bytes while they are read from start to end.

    Attributes:
        position: The number of bytes read so far.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by close()
        self.position, self._sha256 = 0, hashlib.sha256()

    def readinto(self, buffer: memoryview) -> int:
        count = self._file.readinto(buffer)
        self._sha256.update(memoryview(buffer)[:count])
        self.position += count
        return count

    def digest(self) -> str:
        """Read the rest of the file and return the SHA-256 (hex) of the complete file."""
        read_out(self)
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


class ZstdStream(_Readable):
    """The decompressed content of all frames of a zstandard stream.

    Raises:
        EOFError: A read finds that the stream ends inside a frame.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._frame, self._left = source, None, b""
        self._out = memoryview(b"")

    def readinto(self, buffer: memoryview) -> int:
        while not self._out:
            data = self._left or self._source.read(_READ)
            self._left = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the zstandard data ends inside a frame: truncated")
                return 0
            if self._frame is None:
                # Most archives need a window of 8 MiB, but `--long` archives need up to 2 GiB.
                decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
                self._frame = decompressor.decompressobj()
            self._out = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count


class _Counted(_Readable):
    """A stream that counts the bytes that it returns."""

    def __init__(self, stream: Any, count: Callable[[int], None]) -> None:
        # The read at the end of a truncated file fails and loses its data, so reads are small.
        self._read = getattr(stream, "readinto1", None) or stream.readinto
        self._count = count

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
        count: A function that is called with the number of bytes that each read produced.
    """
    # A read from this stream returns fewer bytes than requested only at the end of the stream. If
    # the suffix is unknown, the content of `source` is returned unchanged. `count` may raise an
    # error, for example if the total is too large.
    stream, suffix = cast(Any, source), Path(name.lower()).suffix
    if suffix == ".zst":
        stream = ZstdStream(stream)
    elif suffix in _STANDARD:
        stream = _STANDARD[suffix](stream)
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
