"""Sample indices kept on disk, so that the ranks of a machine, and later runs, build each one once.

An index lives in a folder named by a hash of everything that it depends on; the folder appears by a
rename, complete or not at all, and is then mapped, so that all processes of a machine share its
memory. No rank counts on what another rank has built: each looks for the folder where it runs,
builds it if it is missing (one process a machine, or one of all machines where they share a file
system with locks), and so every machine has it whether or not machines share files.
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

_ALGORITHM = 1  # raise it when build_sample_index would give another order
_ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")


def cache_folder(prefix: str | os.PathLike) -> Path:
    """Where the indices of shards are kept: `index_cache` beside them, or, where that cannot be
    written, a folder of this user's among the machine's temporary files."""
    folder = Path(os.fspath(prefix).split(" + ")[0]).parent / "index_cache"
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
    """`build_sample_index`, kept in `cache_dir`; `name` labels its folder."""
    key = hashlib.sha256(
        f"{_ALGORITHM} {documents} {num_samples} {seq_length} {seed}\n".encode()
        + hashlib.sha256(np.ascontiguousarray(sizes[slice(*documents)])).digest()
    ).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}_{num_samples}ns_{seq_length}sl_{seed}s_{key}"
    found = _load(folder)
    if found is None:
        with one_at_a_time(Path(cache_dir) / ".lock"):
            found = _load(folder)  # another process may have built it meanwhile
            if found is None:
                shutil.rmtree(folder, ignore_errors=True)  # there, but damaged
                built = build_sample_index(sizes, documents, num_samples, seq_length, seed)
                found = _stored(built, folder)
    return found


def _load(folder: Path) -> SampleIndex | None:
    """The index kept in `folder`, mapped; None if it is not there or cannot be read."""
    if not folder.is_dir():
        return None
    try:
        arrays = [np.load(folder / f"{array}.npy", mmap_mode="r") for array in _ARRAYS]
    except (OSError, ValueError, EOFError):
        return None
    # np.memmap itself is slow to index.
    return SampleIndex(*(array.view(np.ndarray) for array in arrays))


def _stored(index: SampleIndex, folder: Path) -> SampleIndex:
    """Keep `index`; return it mapped, or as it is where the disk does not take it."""
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        part.mkdir(parents=True)
        for array in _ARRAYS:
            with open(part / f"{array}.npy", "wb") as file:
                np.save(file, getattr(index, array))
                file.flush()
                os.fsync(file.fileno())
        os.rename(part, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process, on a file system without locks, was first
            print(f"{folder}: the sample index cannot be kept: {error}", file=sys.stderr)
            return index
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return _load(folder) or index
