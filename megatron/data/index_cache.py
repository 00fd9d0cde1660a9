"""Sample indices kept on disk, so that the ranks of a machine, and later runs, build each one once.

An index lives in a folder named by a hash of everything that it depends on; the folder appears by a
rename, complete or not at all, and is then mapped, so that all processes share its memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path

import numpy as np

from .locks import one_at_a_time
from .sample_index import SampleIndex, build_sample_index

_ALGORITHM = 1  # raise it when build_sample_index would give another order
_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")


def cached_sample_index(
    cache_dir: str | os.PathLike,
    name: str,
    sizes: np.ndarray,
    documents: tuple[int, int],
    num_samples: int,
    seq_length: int,
    seed: int,
) -> SampleIndex:
    """`build_sample_index`, kept in `cache_dir`; `name` labels its folder."""
    key = hashlib.sha256(
        f"{_ALGORITHM} {documents} {num_samples} {seq_length} {seed}\n".encode()
        + hashlib.sha256(np.ascontiguousarray(sizes[slice(*documents)])).digest()
    ).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}_{num_samples}ns_{seq_length}sl_{seed}s_{key}"
    if not folder.is_dir():
        with one_at_a_time(Path(cache_dir) / ".lock"):
            if not folder.is_dir():
                index = build_sample_index(sizes, documents, num_samples, seq_length, seed)
                _store(index, folder)
    arrays = (np.load(folder / f"{array}.npy", mmap_mode="r") for array in _ARRAYS)
    return SampleIndex(
        *(array.view(np.ndarray) for array in arrays)
    )  # np.memmap itself is slow to index


def _store(index: SampleIndex, folder: Path) -> None:
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    part.mkdir(parents=True)
    try:
        for array in _ARRAYS:
            np.save(part / f"{array}.npy", getattr(index, array))
        os.rename(part, folder)
    except OSError:
        if not folder.is_dir():  # else another process, on a file system without locks, was first
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
