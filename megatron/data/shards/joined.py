"""Open several token shards and read them, one after the other, as one data set."""

import glob
import os
import resource
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.shards.format import starts_in_bin
from megatron.data.shards.interface import Shards
from megatron.data.shards.manifest import check_tokenizer, partition_of, read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer

_IDX = ".idx"
DataPath = str | os.PathLike | Sequence[str | os.PathLike]
"""The prefix of a shard (its path without .bin or .idx), a glob pattern, or a list of these."""


def find_prefixes(data_path: DataPath) -> list[str]:
    """Return the paths (without .bin or .idx) of the shards that `data_path` names, in order.

    Args:
        data_path: Paths or glob patterns. The matches of a pattern are sorted.

    Raises:
        ShardError: `data_path` is empty, or a path occurs twice.
        ShardError: A pattern matches no shard, or only some parts of a corpus.
    """
    # The parts of a corpus are the partitions of a preparation run.
    given = [data_path] if isinstance(data_path, str | os.PathLike) else data_path
    found: list[str] = []
    for path in [os.fspath(each) for each in given]:
        if not any(character in path for character in "*?[") or os.path.exists(path + _IDX):
            found.append(path)
            continue
        matches = sorted(match[: -len(_IDX)] for match in glob.glob(path + _IDX, recursive=True))
        if not matches:
            raise ShardError(
                f"{path}: no shards ({path}.idx) match; make them with prepare_data.py"
            )
        _check_all_partitions(path, matches)
        found += matches
    if twice := sorted({path for path in found if found.count(path) > 1}):
        raise ShardError(f"{', '.join(twice)}: named more than once")
    if not found:
        raise ShardError("data_path: an empty list names no shards")
    return found


def _check_all_partitions(pattern: str, prefixes: list[str]) -> None:
    """Check that no part of a corpus is missing.

    Args:
        pattern: The glob pattern for the error message.
        prefixes: The paths of the shards that match, without .bin or .idx.

    Raises:
        ShardError: A part is missing.
    """
    # Each process of `prepare_data.py --partition I/N` writes the shard of one partition. If
    # `prefixes` name one partition of a run, they must name all partitions of this run.
    found: dict[int, Counter[int]] = {}
    for prefix in prefixes:
        if partition := partition_of(read_manifest(prefix)):
            found.setdefault(partition["of"], Counter())[partition["part"]] += 1
    for of, parts in found.items():
        corpora = max(parts.values())
        if missing := [part for part in range(1, of + 1) if parts[part] < corpora][:9]:
            raise ShardError(
                f"{pattern}: partition {', '.join(map(str, missing))} of {of} is missing; prepare "
                "it, or name the prefixes one by one to do without"
            )


def open_each(data_path: DataPath, tokenizer: Tokenizer | None = None) -> list[ShardReader]:
    """Open each shard that `data_path` names, in order.

    Args:
        tokenizer: The tokenizer that must have made the shards, or None to accept any tokenizer.

    Raises:
        ShardError: A shard cannot be read, or another tokenizer made it.
    """
    # A shard without a manifest is always accepted.
    prefixes = find_prefixes(data_path)
    if tokenizer is not None:
        for prefix in prefixes:
            check_tokenizer(prefix, tokenizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a memory-mapped file stays open
    if resource.RLIM_INFINITY not in (soft, hard):
        limits = min(soft + 2 * len(prefixes), hard), hard
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return [ShardReader(prefix) for prefix in prefixes]


def join(readers: Sequence[ShardReader]) -> Shards:
    """Join the shards into one data set. A single shard is returned unchanged."""
    return readers[0] if len(readers) == 1 else JoinedShards(readers)


class JoinedShards:
    """Several shards as one data set that implements `Shards`.

    The documents have the order of the shards: first all documents of the first shard, then all
    documents of the second shard, and so on.

    Raises:
        ShardError: The shards differ in dtype or tokenizer.
    """

    # All arrays equal those of a single shard with the same documents. `tokens[a:b]` is a view if
    # the slice lies in one shard, otherwise a copy.

    def __init__(self, readers: Sequence[ShardReader]) -> None:
        check_compatible(readers)
        self.prefix = " + ".join(reader.prefix for reader in readers)
        self.folder = readers[0].folder
        self.dtype = readers[0].dtype
        self.sizes = np.concatenate([reader.sizes for reader in readers])
        self.tokens = _JoinedTokens([reader.tokens for reader in readers], self.dtype)
        self.pointers, _ = starts_in_bin(self.sizes, self.dtype.itemsize, 0)

    def __len__(self) -> int:
        return len(self.sizes)


class _JoinedTokens:
    """Several token arrays that can be sliced as if they were concatenated.

    Attributes:
        starts: The index in the concatenation at which each array starts. The last entry is the
            length of the concatenation.
    """

    def __init__(self, arrays: list[np.ndarray], dtype: np.dtype) -> None:
        self._arrays, self._dtype = arrays, dtype
        self.starts: list[int] = np.cumsum([0, *map(len, arrays)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, span: slice, /) -> np.ndarray:
        begin, end, _ = span.indices(len(self))
        number = max(0, bisect_right(self.starts, begin) - 1)
        pieces = []
        while begin < end:
            start, stop = self.starts[number], self.starts[number + 1]
            pieces.append(self._arrays[number][begin - start : min(end, stop) - start])
            begin, number = max(begin, min(end, stop)), number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self._dtype)


def check_compatible(readers: Sequence[ShardReader]) -> None:
    """Check that the shards can be joined into one data set.

    Raises:
        ShardError: The shards differ in dtype, or their manifests name different tokenizers.
    """
    first, known = readers[0], None
    for reader in readers:
        if reader.dtype != first.dtype:
            raise ShardError(
                f"{reader.prefix}: holds {reader.dtype.name}, {first.prefix} {first.dtype.name}: "
                "they were made with different tokenizers"
            )
        fingerprint = (read_manifest(reader.prefix) or {}).get("tokenizer_fingerprint")
        known = known or fingerprint
        if fingerprint != known and fingerprint is not None:
            raise ShardError(
                f"{reader.prefix}: was made with another tokenizer than {first.prefix}"
            )
