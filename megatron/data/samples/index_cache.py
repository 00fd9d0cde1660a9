"""Cache sample indices on disk, for all processes of a machine and for later runs.

The name of an index folder contains a hash of everything that the index depends on. The folder is
written under a temporary name and then renamed, so it is never incomplete. Large arrays are
memory-mapped, so all processes of a machine share one copy.

Every rank looks for the folder and builds the index if the folder is missing. A file lock lets only
one process build the index at a time. Therefore every machine gets the index, whether or not the
machines share a file system.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np

from megatron.data.errors import DataError
from megatron.data.locks import one_at_a_time
from megatron.data.samples.index import IndexArguments, SampleIndex, build_sample_index
from megatron.files import flush

_ALGORITHM = 1  # increase it when `build_sample_index` changes the order
_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")
_MAPPED_BYTES = 1 << 20  # a smaller array is read, because a memory-mapped one keeps a file open


def cache_folder(data_folder: Path) -> Path:
    """Return the folder for cached sample indices, and create it if it does not exist.

    The folder is in `data_folder`. If the process cannot write to `data_folder`, the folder is in
    the system's temporary folder.

    Raises:
        DataError: The folder in the system's temporary folder belongs to another user.
    """
    # The folder's name in `data_folder`, the folder of the token shards, is `index_cache`. The
    # folder in the temporary folder belongs to the current user.
    folder = data_folder / "index_cache"
    try:
        folder.mkdir(exist_ok=True)
        (probe := folder / f".{uuid.uuid4().hex}").touch()
        probe.unlink()
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"kerple-index-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():  # it could hold another order of samples
            raise DataError(
                f"{folder}: belongs to another user; set TMPDIR to a folder of your own"
            ) from None
    return folder


def cached_sample_index(
    cache_dir: str | os.PathLike, name: str, arguments: IndexArguments
) -> SampleIndex:
    """Load a sample index from `cache_dir`, or build and store it.

    Args:
        name: The name of the split, such as "train". The name of the index folder starts with it.
    """
    sizes, documents, num_samples, seq_length, seed = arguments
    key = hashlib.sha256(
        f"{_ALGORITHM} {documents} {num_samples} {seq_length} {seed}\n".encode()
        + hashlib.sha256(np.ascontiguousarray(sizes[slice(*documents)]).data).digest()
    ).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}_{num_samples}ns_{seq_length}sl_{seed}s_{key}"
    found = _load(folder)
    if found is None:
        with one_at_a_time(Path(cache_dir) / ".lock"):
            found = _load(folder)  # another process may have built it meanwhile
            if found is None:
                shutil.rmtree(folder, ignore_errors=True)  # if the folder exists, it is damaged
                found = _store(build_sample_index(arguments), folder)
    return found


def _load(folder: Path) -> SampleIndex | None:
    """Load the sample index in `folder`, or return None if a file is missing or unreadable."""
    # A text that is continued past its plan has an index for each further epoch.
    if not folder.is_dir():
        return None
    try:
        arrays = [
            np.load(path, mmap_mode="r" if path.stat().st_size > _MAPPED_BYTES else None)
            for path in (folder / f"{array}.npy" for array in _ARRAYS)
        ]
    except (OSError, ValueError, EOFError):
        return None
    # Indexing an np.memmap itself is slow.
    return SampleIndex(*(array.view(np.ndarray) for array in arrays))


def _store(index: SampleIndex, folder: Path) -> SampleIndex:
    """Store `index` in `folder`, and return it as `_load` does."""
    # If storing fails, `index` itself is returned.
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir(parents=True)
        for array in _ARRAYS:
            path = unfinished / f"{array}.npy"
            np.save(path, getattr(index, array))
            flush(path)
        os.rename(unfinished, folder)
    except OSError as error:
        # If the folder exists, another process stored the index first. This can happen on a file
        # system without locks.
        if not folder.is_dir():
            print(f"{folder}: the sample index cannot be kept: {error}", file=sys.stderr)
            return index
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return _load(folder) or index
