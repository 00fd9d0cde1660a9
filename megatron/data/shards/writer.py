"""Write a token shard, PREFIX.bin and PREFIX.idx (see `format.py`), completely or not at all."""

import os
import uuid
from contextlib import AbstractContextManager, suppress
from typing import BinaryIO

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.locks import try_lock
from megatron.data.shards.format import CODES, HEADER, MAGIC, shard_path, starts_in_bin
from megatron.files import flush, write_bytes

_ROWS = 1 << 16  # the number of documents handled at a time (2 MB) to complete the .idx file


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """A writer of a token shard, the files PREFIX.bin and PREFIX.idx.

    The files have the suffix .part until `finalize` completes them. Only one process at a time may
    write the same PREFIX.

    Attributes:
        documents, tokens: The numbers of documents and tokens written so far.
        manifest: The content of PREFIX.json as bytes, or None.
        keep_parts: Whether to keep the .part files if the `with` block raises an error.

    Raises:
        ShardError: The format does not support `dtype`, the folder cannot be created, or another
            process is writing the same PREFIX.
    """

    # `finalize` renames both files, the .idx last. If the .idx file exists, the shard is therefore
    # complete. `finalize` also writes PREFIX.json, and it is called at the end of a `with` block.
    # If the block raises an error, the .part files are removed unless `keep_parts` is True.
    # - A killed process leaves its .part files. To continue them, make a new writer of the same
    #   PREFIX and call `rewind` with the numbers that `sync` returned last. Without `rewind`, the
    #   new writer overwrites the .part files.

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type) -> None:
        self.prefix, self.dtype = os.fspath(prefix), np.dtype(dtype)
        if self.dtype not in CODES:
            raise ShardError(
                f"{prefix}: no dtype code for {self.dtype}; known: {sorted(map(str, CODES))}"
            )
        self.manifest: bytes | None = None
        self.keep_parts = False
        self.documents = self.tokens = 0
        self._name_parts(".part")
        self._file = self._open_tokens()
        locked = try_lock(self._file.fileno(), wait=False)
        if locked is None:  # The file system has no locks, so use names that no other process uses.
            self._remove_parts()
            self._file.close()
            self._name_parts(f".{uuid.uuid4().hex[:8]}.part")
            self._file = self._open_tokens()
        elif not locked or not self._owns_part():
            self._file.close()
            raise ShardError(
                f"{self._part}: another process is writing this data set; wait for it to end"
            )
        # Do not truncate the files here, because a new run may continue them with `rewind`.
        self._sizes = _open(self._idx_part)
        self._found = (self._file.seek(0, os.SEEK_END), self._sizes.seek(0, os.SEEK_END))
        self._rewound = False

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        try:
            if exc_type is None and not self._file.closed:
                self.finalize()
        finally:
            if not self.keep_parts and not self._file.closed:
                self._remove_parts()
            self._close()

    def holds(self, documents: int, tokens: int) -> bool:
        """Return whether the .part files of an earlier writer contain enough documents and tokens.

        Call `rewind` only if the result is True.

        Args:
            documents: The smallest number of documents that is enough.
            tokens: The number of tokens in these documents.
        """
        bin_bytes, idx_bytes = self._found
        return (
            bin_bytes >= tokens * self.dtype.itemsize and idx_bytes >= HEADER.size + documents * 4
        )

    def rewind(self, documents: int, tokens: int) -> None:
        """Keep the first documents in the .part files of an earlier writer, and cut off the rest.

        Args:
            documents: The number of documents to keep.
            tokens: The number of tokens in these documents.
        """
        # The .part files are truncated there.
        for file, end in (
            (self._file, tokens * self.dtype.itemsize),
            (self._sizes, HEADER.size + documents * 4),
        ):
            file.seek(end)
            file.truncate()
        self.documents, self.tokens, self._rewound = documents, tokens, True

    def sync(self) -> tuple[int, int]:
        """Flush all data to disk and return the numbers of documents and tokens written so far."""
        self._begin()
        for file in (self._file, self._sizes):
            file.flush()
            os.fdatasync(file.fileno())
        return self.documents, self.tokens

    def add_documents(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Append n documents.

        Args:
            tokens: The tokens of the documents, one document after the other.
            sizes: The number of tokens in each document, [n].

        Raises:
            ValueError: A token does not fit the dtype of the shard.
            OverflowError: The number of tokens in a document does not fit int32.
        """
        if tokens.dtype != self.dtype:
            stored = tokens.astype(self.dtype)
            if self.dtype.kind != "f" and not np.array_equal(stored, tokens):
                raise ValueError(
                    f"{self.prefix}: a token of document {self.documents} does not fit {self.dtype}"
                )
            tokens = stored
        if len(sizes) and not 0 <= sizes.min() <= sizes.max() <= np.iinfo(np.int32).max:
            raise OverflowError(f"{self.prefix}: a document of {sizes.max()} tokens: not int32")
        self._begin()
        self._sizes.write(np.ascontiguousarray(sizes, "<i4").data)
        self._file.write(np.ascontiguousarray(tokens, self.dtype.newbyteorder("<")).data)
        self.documents += len(sizes)
        self.tokens += len(tokens)

    def finalize(self) -> None:
        """Complete both files, rename them to PREFIX.bin and PREFIX.idx, and close the writer."""
        self._begin()
        self._complete_idx()
        for file in (self._file, self._sizes):
            file.flush()
            os.fsync(file.fileno())
        idx, manifest = shard_path(self.prefix, ".idx"), shard_path(self.prefix, ".json")
        idx.unlink(missing_ok=True)  # this deletes an earlier shard of the same name
        flush(idx.parent)
        os.replace(self._part, shard_path(self.prefix, ".bin"))
        if self.manifest is None:
            manifest.unlink(missing_ok=True)
        else:
            write_bytes(manifest, self.manifest)
        os.replace(self._idx_part, idx)
        flush(idx.parent)
        self._close()  # also releases the lock

    def _begin(self) -> None:
        """Empty the .part files, unless `rewind` has already been called."""
        if not self._rewound:
            self.rewind(0, 0)

    def _complete_idx(self) -> None:
        """Append `pointers` and `doc_idx` to PREFIX.idx.part, and write the header of the file."""
        n, itemsize, address = self.documents, self.dtype.itemsize, 0
        self._sizes.flush()
        for start in range(0, n, _ROWS):
            count = min(_ROWS, n - start)
            self._sizes.seek(HEADER.size + start * 4)
            sizes = np.frombuffer(self._sizes.read(count * 4), "<i4")
            starts, address = starts_in_bin(sizes, itemsize, address)
            self._sizes.seek(HEADER.size + n * 4 + start * 8)
            self._sizes.write(starts.astype("<i8", copy=False).data)
        self._sizes.seek(HEADER.size + n * 12)
        for start in range(0, n + 1, _ROWS):
            self._sizes.write(np.arange(start, min(start + _ROWS, n + 1), dtype="<i8").data)
        self._sizes.truncate()
        self._sizes.seek(0)
        self._sizes.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], n, n + 1))

    def _name_parts(self, ending: str) -> None:
        self._part = shard_path(self.prefix, f".bin{ending}")
        self._idx_part = shard_path(self.prefix, f".idx{ending}")

    def _open_tokens(self) -> BinaryIO:
        """Open PREFIX.bin.part, and create its folder.

        Raises:
            ShardError: The path of the folder, or a part of it, is a file.
        """
        folder = self._part.parent
        if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
            raise ShardError(
                f"{folder}: is a file, or would lie in one; name a folder for the shards"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return _open(self._part)

    def _remove_parts(self) -> None:
        if self._owns_part():
            self._part.unlink()
            self._idx_part.unlink(missing_ok=True)

    def _close(self) -> None:
        for file in (self._sizes, self._file):
            with suppress(OSError):  # closing flushes the buffers, which fails on a full disk
                file.close()

    def _owns_part(self) -> bool:
        """Return whether the .part file is still the file that this writer opened."""
        # Another writer may have renamed or removed it before this writer locked it.
        try:
            return os.path.samestat(os.stat(self._part), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _open(path: os.PathLike) -> BinaryIO:
    """Open a file for reading and writing, without truncating it."""
    # The file is created if it does not exist.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=1 << 20)
