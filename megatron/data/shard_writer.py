"""Writing token shards, PREFIX.bin and PREFIX.idx (`shard_format.py`), whole or not at all."""

from __future__ import annotations

import os
import uuid
from array import array
from contextlib import suppress

import numpy as np

from .errors import ShardError
from .locks import try_lock
from .shard_format import CODES, HEADER, MAGIC, shard_path


class MMapIndexedDatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx so that no .idx ever exists without its complete .bin.

    Tokens go to PREFIX.bin.part; `finalize` renames it and then puts the .idx, the mark that the
    data set is whole, in place by a rename too. A killed writer leaves at most the .part file,
    which the next writer of the same PREFIX takes over; a second living writer of one PREFIX is
    refused (ShardError). As a context manager it finalizes at the end, or removes what it wrote if
    an exception passes through.

    `manifest` (bytes, optional) becomes PREFIX.json, in place before the .idx.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type) -> None:
        self.prefix, self.dtype = os.fspath(prefix), np.dtype(dtype)
        if self.dtype not in CODES:
            raise ShardError(
                f"{prefix}: no dtype code for {self.dtype}; known: {sorted(map(str, CODES))}"
            )
        self.manifest: bytes | None = None
        self._sizes = array("i")
        self._open_part(".part")
        locked = try_lock(self._file.fileno(), wait=False)
        if locked is None:  # no locks here: a name that no other process uses
            self.abort()
            self._open_part(f".{uuid.uuid4().hex[:8]}.part")
        elif not locked or not self._still_ours():
            self._file.close()
            raise ShardError(
                f"{self._part}: another process is writing this data set; wait for it to end"
            )
        self._file.truncate(0)

    def __enter__(self) -> MMapIndexedDatasetWriter:
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        if self._file.closed:
            return
        if exc_type is None:
            self.finalize()
        else:
            self.abort()

    def __len__(self) -> int:
        return len(self._sizes)

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document (1-D, may be empty). ValueError if a token does not fit the dtype."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1:
            raise ValueError(f"a document is one-dimensional, not {tokens.shape}")
        if tokens.dtype != self.dtype:
            stored = tokens.astype(self.dtype)
            if self.dtype.kind != "f" and not np.array_equal(stored, tokens):
                raise ValueError(
                    f"{self.prefix}: a token of document {len(self)} does not fit {self.dtype}"
                )
            tokens = stored
        self._sizes.append(len(tokens))  # OverflowError beyond int32: the format's limit
        self._file.write(np.ascontiguousarray(tokens, self.dtype.newbyteorder("<")))

    def finalize(self) -> None:
        """Put both files in place. Nothing can be added afterwards."""
        idx, idx_part = shard_path(self.prefix, ".idx"), shard_path(self.prefix, f".idx{self._tag}")
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
        ends = np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
        n = len(sizes)
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            with open(idx_part, "wb") as file:
                file.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], n, n + 1))
                file.write(sizes.astype("<i4", copy=False))
                file.write((ends - sizes * np.int64(self.dtype.itemsize)).astype("<i8", copy=False))
                file.write(np.arange(n + 1, dtype="<i8"))
                file.flush()
                os.fsync(file.fileno())
            idx.unlink(missing_ok=True)  # an earlier data set of this name ends here
            os.replace(self._part, shard_path(self.prefix, ".bin"))
            manifest = shard_path(self.prefix, ".json")
            if self.manifest is None:
                manifest.unlink(missing_ok=True)
            else:
                manifest.write_bytes(self.manifest)
            os.replace(idx_part, idx)
        except BaseException:  # a full disk, for one: give its space back
            idx_part.unlink(missing_ok=True)
            self.abort()
            raise
        self._file.close()  # and with it the lock

    def abort(self) -> None:
        """Remove what was written; an earlier data set of this name stays as it was."""
        if self._still_ours():
            self._part.unlink()
        with suppress(OSError):  # closing flushes, to a disk that may be full
            self._file.close()

    def _open_part(self, tag: str) -> None:
        """Open PREFIX.bin + tag, not truncated: until the lock is ours, it may be another's."""
        self._tag, self._part = tag, shard_path(self.prefix, f".bin{tag}")
        self._part.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666)
        self._file = os.fdopen(fd, "r+b", buffering=1 << 20)

    def _still_ours(self) -> bool:
        """Whether the open file still bears the .part name; an earlier writer may have moved it."""
        try:
            return os.path.samestat(os.stat(self._part), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
