"""Sample indices kept on disk: the processes of a machine, and later runs, build each index once.

The folder of an index is named by a hash of everything that the index depends on. It appears by a
rename, so it is complete or absent. Its arrays are mapped, so all processes of a machine share
their memory. No rank relies on the index that another rank built: each looks for the folder on its
machine and builds it if it is missing. A lock lets one process build at a time. So every machine
gets the index, whether or not the machines share a file system.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np

from megatron.data.locks import one_at_a_time
from megatron.data.samples.index import SampleIndex, build_sample_index
from megatron.files import flush

_ALGORITHM = 1  # raise it when build_sample_index would give another order
_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")


def cache_folder(data_folder: Path) -> Path:
    """The folder for the indices of shards: `index_cache` in the shards' folder.

    If that cannot be written, it is a folder of this user among the machine's temporary files.
    """
    folder = data_folder / "index_cache"
    try:
        folder.mkdir(exist_ok=True)
        (probe := folder / f".{uuid.uuid4().hex}").touch()
        probe.unlink()
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"kerple-index-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def cached_sample_index(
    cache_dir: str | os.PathLike,
    name: str,
    sizes: np.ndarray,
    documents: tuple[int, int],
    num_samples: int,
    seq_length: int,
    seed: int,
) -> SampleIndex:
    """`build_sample_index`, kept in a folder of `cache_dir` whose name begins with `name`."""
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
                shutil.rmtree(folder, ignore_errors=True)  # it exists, but is damaged
                built = build_sample_index(sizes, documents, num_samples, seq_length, seed)
                found = _store(built, folder)
    return found


def _load(folder: Path) -> SampleIndex | None:
    """The index kept in `folder`, mapped; None if it is absent or cannot be read."""
    if not folder.is_dir():
        return None
    try:
        arrays = [np.load(folder / f"{array}.npy", mmap_mode="r") for array in _ARRAYS]
    except (OSError, ValueError, EOFError):
        return None
    # Indexing an np.memmap itself is slow.
    return SampleIndex(*(array.view(np.ndarray) for array in arrays))


def _store(index: SampleIndex, folder: Path) -> SampleIndex:
    """Keep `index` in `folder`; return it mapped, or as it is if the disk refuses it."""
    # Not `files.replacing`: machines that share the folder may share process ids.
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir(parents=True)
        for array in _ARRAYS:
            path = unfinished / f"{array}.npy"
            np.save(path, getattr(index, array))
            flush(path)
        os.rename(unfinished, folder)
    except OSError as error:
        # If the folder exists, another process was faster, on a file system without locks.
        if not folder.is_dir():
            print(f"{folder}: the sample index cannot be kept: {error}", file=sys.stderr)
            return index
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return _load(folder) or index
