"""Writing token shards, PREFIX.bin and PREFIX.idx (`shard_format.py`), whole or not at all."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.locks import try_lock
from megatron.data.shards.format import CODES, HEADER, MAGIC, shard_path

_ROWS = 1 << 16  # documents handled at a time when the .idx is finished: 2 MB of memory


class ShardWriter:
    """Writes PREFIX.bin and PREFIX.idx so that no .idx ever exists without its complete .bin.

    Tokens go to PREFIX.bin.part and document sizes to PREFIX.idx.part, so memory does not grow with
    the number of documents. `finalize` completes both, renames the first and then the second, the
    mark that the data set is whole. A killed writer leaves at most the .part files, which the next
    writer of the same PREFIX takes over; a second living writer of one PREFIX is refused
    (ShardError). As a context manager it finalizes at the end, or removes what it wrote if an
    exception passes through (`keep_parts`: leaves the .part files for `rewind`).

    `manifest` (bytes, optional) becomes PREFIX.json, in place before the .idx.

    To go on after a killed writer: `rewind(documents, tokens)` to a state that `sync` reported.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type) -> None:
        self.prefix, self.dtype = os.fspath(prefix), np.dtype(dtype)
        if self.dtype not in CODES:
            raise ShardError(
                f"{prefix}: no dtype code for {self.dtype}; known: {sorted(map(str, CODES))}"
            )
        self.manifest: bytes | None = None
        self.keep_parts = False
        self._open_part(".part")
        locked = try_lock(self._file.fileno(), wait=False)
        self.shared_name = locked is not None
        if locked is None:  # no locks here: a name that no other process uses
            self._remove_parts()
            self._file.close()
            self._open_part(f".{uuid.uuid4().hex[:8]}.part")
        elif not locked or not self._still_ours():
            self._file.close()
            raise ShardError(
                f"{self._part}: another process is writing this data set; wait for it to end"
            )
        self._sizes = None
        self._left = (self._file.seek(0, os.SEEK_END), _size_of(self._idx_part))
        self.documents = self.tokens = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        if self._file.closed:
            return
        if exc_type is None:
            self.finalize()
        elif self.keep_parts:
            self._close()
        else:
            self.abort()

    def __len__(self) -> int:
        return self.documents

    def holds(self, documents: int, tokens: int) -> bool:
        """Whether the .part files that were found here are at least this long."""
        bin_bytes, idx_bytes = self._left
        return (
            bin_bytes >= tokens * self.dtype.itemsize and idx_bytes >= HEADER.size + documents * 4
        )

    def rewind(self, documents: int, tokens: int) -> None:
        """Drop whatever was written after the first `documents` documents with `tokens` tokens."""
        self._sizes = self._sizes or _open(self._idx_part)
        for file, end in (
            (self._file, tokens * self.dtype.itemsize),
            (self._sizes, HEADER.size + documents * 4),
        ):
            file.seek(end)
            file.truncate()
        self.documents, self.tokens = documents, tokens

    def sync(self) -> tuple[int, int]:
        """Bring everything to the disk; return (documents, tokens)."""
        self._open_sizes()
        for file in (self._file, self._sizes):
            file.flush()
            os.fdatasync(file.fileno())
        return self.documents, self.tokens

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document (1-D, may be empty). ValueError if a token does not fit the dtype."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1:
            raise ValueError(f"a document is one-dimensional, not {tokens.shape}")
        self.add_documents(tokens, np.array([len(tokens)]))

    def add_documents(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Append the documents that lie one after the other in `tokens` [sum of sizes]."""
        if tokens.dtype != self.dtype:
            stored = tokens.astype(self.dtype)
            if self.dtype.kind != "f" and not np.array_equal(stored, tokens):
                raise ValueError(
                    f"{self.prefix}: a token of document {len(self)} does not fit {self.dtype}"
                )
            tokens = stored
        if len(sizes) and not 0 <= sizes.min() <= sizes.max() <= np.iinfo(np.int32).max:
            raise OverflowError(f"{self.prefix}: a document of {sizes.max()} tokens: not int32")
        self._open_sizes()
        self._sizes.write(np.ascontiguousarray(sizes, "<i4"))
        self._file.write(np.ascontiguousarray(tokens, self.dtype.newbyteorder("<")))
        self.documents += len(sizes)
        self.tokens += len(tokens)

    def finalize(self) -> None:
        """Put both files in place. Nothing can be added afterwards."""
        idx = shard_path(self.prefix, ".idx")
        try:
            self._open_sizes()
            self._complete_idx()
            for file in (self._file, self._sizes):
                file.flush()
                os.fsync(file.fileno())
            idx.unlink(missing_ok=True)  # an earlier data set of this name ends here
            os.replace(self._part, shard_path(self.prefix, ".bin"))
            manifest = shard_path(self.prefix, ".json")
            if self.manifest is None:
                manifest.unlink(missing_ok=True)
            else:
                manifest.write_bytes(self.manifest)
            os.replace(self._idx_part, idx)
        except BaseException:  # a full disk, for one: give its space back
            if not self.keep_parts:
                self.abort()
            raise
        self._close()  # and with it the lock

    def abort(self) -> None:
        """Remove what was written; an earlier data set of this name stays as it was."""
        if not self._file.closed:
            self._remove_parts()
        self._close()

    def _complete_idx(self) -> None:
        """Append pointers and doc_idx to the sizes, then write the header, in bounded memory."""
        n, itemsize, address = self.documents, self.dtype.itemsize, 0
        self._sizes.flush()
        for start in range(0, n, _ROWS):
            count = min(_ROWS, n - start)
            self._sizes.seek(HEADER.size + start * 4)
            sizes = np.frombuffer(self._sizes.read(count * 4), "<i4")
            ends = address + np.cumsum(sizes, dtype=np.int64) * itemsize
            self._sizes.seek(HEADER.size + n * 4 + start * 8)
            self._sizes.write((ends - sizes * np.int64(itemsize)).astype("<i8", copy=False))
            address = int(ends[-1])
        self._sizes.seek(HEADER.size + n * 12)
        for start in range(0, n + 1, _ROWS):
            self._sizes.write(np.arange(start, min(start + _ROWS, n + 1), dtype="<i8"))
        self._sizes.truncate()
        self._sizes.seek(0)
        self._sizes.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], n, n + 1))

    def _open_part(self, tag: str) -> None:
        """Open PREFIX.bin + tag, not truncated: until the lock is ours, it may be another's."""
        self._part = shard_path(self.prefix, f".bin{tag}")
        self._idx_part = shard_path(self.prefix, f".idx{tag}")
        try:
            self._part.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ShardError(
                f"{self._part.parent}: is a file, or would lie in one; name a folder for the shards"
            ) from None
        self._file = _open(self._part)

    def _open_sizes(self) -> None:
        """Open the .idx part at the first use, when the lock is ours; start anew unless told."""
        if self._sizes is None:
            self.rewind(0, 0)

    def _remove_parts(self) -> None:
        if self._still_ours():
            self._part.unlink()
            self._idx_part.unlink(missing_ok=True)

    def _close(self) -> None:
        for file in (self._sizes, self._file):
            with suppress(OSError):  # closing flushes, to a disk that may be full
                if file is not None:
                    file.close()

    def _still_ours(self) -> bool:
        """Whether the open file still bears the .part name; an earlier writer may have moved it."""
        try:
            return os.path.samestat(os.stat(self._part), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _open(path: os.PathLike):
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=1 << 20)


def _size_of(path: os.PathLike) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0
