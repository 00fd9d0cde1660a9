"""Read one token shard, PREFIX.bin and PREFIX.idx (see `format.py`), by mapping it into memory."""

import mmap
import os
from pathlib import Path

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.shards.format import DTYPES, HEADER, MAGIC, OLD_MAGIC, shard_path, starts_in_bin
from megatron.data.shards.interface import tokens_of

_CHECK_ROWS = 1 << 20  # the number of documents whose pointers are checked at a time


class ShardReader:
    """One token shard, mapped into memory. It implements `Shards`.

    The class corresponds to Megatron's `MMapIndexedDataset`.

    Attributes:
        doc_idx: The array of this name in the .idx file.

    Raises:
        ShardError: A file is missing, incomplete or damaged, or the .bin file and the .idx file do
            not belong together.
    """

    # `Shards` describes the other attributes, and `format.py` the .idx file.

    def __init__(self, prefix: str | os.PathLike) -> None:
        self.prefix = os.fspath(prefix)
        self.folder = Path(self.prefix).parent
        self._idx, self._bin = shard_path(prefix, ".idx"), shard_path(prefix, ".bin")
        self._require_files()
        with open(self._idx, "rb") as file:
            num_documents, num_groups, self.dtype = self._parse_header(file.read(HEADER.size))
            found = os.fstat(file.fileno()).st_size
            expected = HEADER.size + num_documents * 12 + num_groups * 8
            if found != expected:
                raise ShardError(
                    f"{self._idx}: {'truncated' if found < expected else 'foreign or damaged'}: "
                    f"{num_documents} documents need {expected} bytes, the file has {found}; copy "
                    "it again or rebuild it with prepare_data.py"
                )
            index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = HEADER.size
        self.sizes = np.frombuffer(index, "<i4", num_documents, at)
        at += self.sizes.nbytes
        self.pointers = np.frombuffer(index, "<i8", num_documents, at)
        at += self.pointers.nbytes
        self.doc_idx = np.frombuffer(index, "<i8", num_groups, at)
        self.tokens = self._map_tokens()

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, i: int) -> np.ndarray:
        """Return the tokens of document `i` as a view, not a copy."""
        return tokens_of(self, (i, i + 1))

    def _require_files(self) -> None:
        missing = [path for path in (self._idx, self._bin) if not path.is_file()]
        if not missing:
            return
        if self.prefix.endswith((".bin", ".idx")):
            advice = f"give the path without its ending: {self.prefix[:-4]}"
        elif len(missing) == 1:
            advice = "copy the other one too, or rebuild both with prepare_data.py"
        elif near := sorted(self.folder.glob(f"{Path(self.prefix).name}*.idx")):
            advice = "did you mean " + " or ".join(str(path)[:-4] for path in near[:3]) + "?"
        else:
            advice = "data_path is the common path of both files; make them with prepare_data.py"
        raise ShardError(f"{' and '.join(map(str, missing))}: no such file; {advice}")

    def _parse_header(self, header: bytes) -> tuple[int, int, np.dtype]:
        """Check the header of the .idx file.

        Returns:
            The number of documents, the number of entries of doc_idx, and the dtype of the tokens.

        Raises:
            ShardError: The header is truncated, or the file has another format.
        """
        if header.startswith(OLD_MAGIC):
            raise ShardError(
                f"{self._idx}: is in the old 'lazy'/'cached' format; write the data again with "
                "--dataset-impl mmap, or with prepare_data.py"
            )
        if header[: len(MAGIC)] != MAGIC[: len(header)]:
            raise ShardError(
                f"{self._idx}: is not an index of the mmap format (it starts with {header[:9]!r}, "
                f"not {MAGIC!r}); check the path"
            )
        if len(header) < HEADER.size:
            raise ShardError(
                f"{self._idx}: truncated: {len(header)} bytes, less than its header; copy it "
                "again or rebuild it with prepare_data.py"
            )
        _, version, code, num_documents, num_groups = HEADER.unpack(header)
        if version != 1:
            raise ShardError(f"{self._idx}: format version {version}; only version 1 is known")
        if code not in DTYPES:
            raise ShardError(f"{self._idx}: unknown dtype code {code}; known: {sorted(DTYPES)}")
        return num_documents, num_groups, DTYPES[code].newbyteorder("<")

    def _map_tokens(self) -> np.ndarray:
        """Map the .bin file into memory and return its tokens.

        Raises:
            ShardError: The .bin file does not have the size that follows from the .idx file.
        """
        with open(self._bin, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            expected = self._check_pointers()
            if found != expected:
                state = "truncated" if found < expected else "not the file that the .idx describes"
                raise ShardError(
                    f"{self._bin}: {state}: {self._idx.name} describes {expected} bytes "
                    f"({len(self)} documents of {self.dtype.name}), the file has {found}; copy "
                    "both files again or rebuild them with prepare_data.py"
                )
            if found == 0:
                return np.empty(0, self.dtype)  # an empty file cannot be mapped
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), self.dtype)

    def _check_pointers(self) -> int:
        """Check that each document in the .idx file starts where the document before it ends.

        Returns:
            The number of bytes that the .bin file must have.

        Raises:
            ShardError: The .idx file is damaged.
        """
        address = 0
        for start in range(0, len(self), _CHECK_ROWS):
            sizes = self.sizes[start : start + _CHECK_ROWS]
            starts, address = starts_in_bin(sizes, self.dtype.itemsize, address)
            if sizes.min() < 0 or not np.array_equal(
                starts, self.pointers[start : start + _CHECK_ROWS]
            ):
                raise ShardError(
                    f"{self._idx}: damaged: the documents' addresses do not follow from their "
                    f"sizes (first seen in documents {start} to {start + len(sizes) - 1}); copy it "
                    "again or rebuild it"
                )
        if len(self.doc_idx) and not 0 <= self.doc_idx.min() <= self.doc_idx.max() <= len(self):
            raise ShardError(
                f"{self._idx}: damaged: doc_idx points outside; copy it again, or rebuild it"
            )
        return address
