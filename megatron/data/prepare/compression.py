"""Byte streams that notice a cut-off file: plain, gzip, zstandard, xz and bzip2.

`zstandard.stream_reader` ends at a truncated file as it ends at a whole one, and reads only the
first of several frames unless told otherwise; `ZstdStream` does neither. Every stream counts and
hashes (SHA-256) the bytes of the file below it, so that reading a file once also identifies it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from pathlib import Path

import zstandard

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
# What a damaged or truncated file raises, by way of the libraries.
DAMAGE = (
    EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError,
    zipfile.BadZipFile,
)  # fmt: skip
_READ = 1 << 16  # compressed bytes at a time
_BUFFER = 1 << 20


class CountedFile(io.RawIOBase):
    """A file read from the start; `position` bytes of it so far, `sha256` of those."""

    def __init__(self, path: str | os.PathLike) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by close()
        self.position, self._sha256 = 0, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        count = self._file.readinto(buffer)
        self._sha256.update(memoryview(buffer)[:count])
        self.position += count
        return count

    def digest(self) -> str:
        """SHA-256 (hex) of the whole file; reads what is left of it."""
        while self.read(_BUFFER):
            pass
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


class ZstdStream(io.RawIOBase):
    """All frames of a zstandard stream; EOFError where it ends inside one."""

    def __init__(self, source: io.RawIOBase | io.BufferedIOBase) -> None:
        self._source, self._frame, self._left = source, None, b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._out:
            data = self._left or self._source.read(_READ)
            self._left = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the zstandard data ends inside a frame: truncated")
                return 0
            if self._frame is None:
                # Archives made with long windows ask for up to 2 GiB; most ask for 8 MiB.
                decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
                self._frame = decompressor.decompressobj()
            self._out = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count


class _Unlost(io.RawIOBase):
    """The standard library's decompressors by small reads: where the data breaks off, they would
    else drop what they had decompressed for the read that fails."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        piece = self._stream.read1(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def decompressed(name: str, source: io.RawIOBase | io.BufferedIOBase) -> io.BufferedReader:
    """`source` decompressed as the suffix of `name` says; `read(n)` gives n bytes up to the end."""
    suffix = Path(name.lower()).suffix
    if suffix in (".gz", ".tgz"):
        return io.BufferedReader(_Unlost(gzip.GzipFile(fileobj=source, mode="rb")), _BUFFER)
    if suffix == ".zst":
        return io.BufferedReader(ZstdStream(source), _BUFFER)
    if suffix == ".xz":
        return io.BufferedReader(_Unlost(lzma.LZMAFile(source)), _BUFFER)
    if suffix == ".bz2":
        return io.BufferedReader(_Unlost(bz2.BZ2File(source)), _BUFFER)
    return io.BufferedReader(source, _BUFFER)


def read_block(stream: io.BufferedReader, size: int) -> tuple[bytes, Exception | None]:
    """`size` bytes, fewer at the end; where the stream breaks, what came before and the error."""
    pieces, missing = [], size
    while missing:
        try:
            piece = stream.read1(missing)
        except DAMAGE as error:
            return b"".join(pieces), error
        if not piece:
            break
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces), None


def hash_file(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_out(stream: io.BufferedIOBase) -> None:
    """Read to the end: checksums stand there, and a truncation shows only there."""
    while stream.read(_BUFFER):
        pass
