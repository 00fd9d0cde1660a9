"""Several shards as one data set: read side by side (`open_shards`) or written as one (`merge`)."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.shards.manifest import read_manifest, to_bytes
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter

_COPY = 1 << 24  # tokens copied at a time
_IDX = ".idx"


def find_prefixes(data_path: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """The shards' prefixes that a prefix, a glob of prefixes, or a list of both names, in order."""
    given = [data_path] if isinstance(data_path, str | os.PathLike) else list(data_path)
    found: list[str] = []
    for path in map(os.fspath, given):
        if not any(character in path for character in "*?[") or os.path.exists(path + _IDX):
            found.append(path)
            continue
        matches = sorted(match[: -len(_IDX)] for match in glob.glob(path + _IDX, recursive=True))
        if not matches:
            raise ShardError(
                f"{path}: no shards ({path}.idx) match; make them with prepare_data.py"
            )
        _check_complete(path, matches)
        found += matches
    if twice := sorted({path for path in found if found.count(path) > 1}):
        raise ShardError(f"{', '.join(twice)}: named more than once")
    if not found:
        raise ShardError("data_path: an empty list names no shards")
    return found


def _check_complete(pattern: str, prefixes: list[str]) -> None:
    """ShardError if partitions that a glob matches are not all of their run: one may still be in
    the making."""
    found: dict[int, set[int]] = {}
    for prefix in prefixes:
        told = ((read_manifest(prefix) or {}).get("source") or {}).get("partition")
        if told:
            found.setdefault(told["of"], set()).add(told["part"])
    for of, parts in found.items():
        if missing := sorted(set(range(1, of + 1)) - parts):
            raise ShardError(
                f"{pattern}: partition {', '.join(map(str, missing))} of {of} is missing; prepare "
                "it, or name the prefixes one by one to do without"
            )


def open_shards(
    data_path: str | os.PathLike | Sequence[str | os.PathLike],
) -> ShardReader | JoinedShards:
    """Open one prefix, or all that a glob or list names as one data set."""
    prefixes = find_prefixes(data_path)
    if len(prefixes) == 1:
        return ShardReader(prefixes[0])
    return JoinedShards(prefixes)


class JoinedShards:
    """Shards one after the other, with the face of `ShardReader`: equal to merged ones.

    `sizes` int32 [n], `pointers` int64 [n] (bytes, as in a merged .bin), `dtype`; `tokens[a:b]`
    gives tokens across the parts, a copy only where it touches two.
    """

    def __init__(self, prefixes: Sequence[str | os.PathLike]) -> None:
        self.prefixes = [os.fspath(prefix) for prefix in prefixes]
        self.prefix = " + ".join(self.prefixes)
        self.parts = [ShardReader(prefix) for prefix in self.prefixes]
        check_alike(self.parts)
        self.dtype = self.parts[0].dtype
        self.sizes = np.concatenate([part.sizes for part in self.parts])
        starts = np.cumsum([0, *(len(part.tokens) for part in self.parts)])
        self.pointers = np.concatenate(
            [
                part.pointers + start * self.dtype.itemsize
                for part, start in zip(self.parts, starts[:-1], strict=True)
            ]
        )
        self.doc_idx = np.arange(len(self.sizes) + 1, dtype=np.int64)
        self.tokens = _JoinedTokens([part.tokens for part in self.parts], self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple:
        return type(self), (self.prefixes,)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of document i, as `ShardReader.get`."""
        first = 0
        for part in self.parts:
            if i < first + len(part):
                return part.get(i - first, offset, length)
            first += len(part)
        raise IndexError(f"{self.prefix}: document {i} of {len(self)}")


class _JoinedTokens:
    """One row of tokens out of several arrays; read by slices."""

    def __init__(self, parts: list[np.ndarray], dtype: np.dtype) -> None:
        self._parts, self.dtype = parts, dtype
        self._starts = np.cumsum([0, *map(len, parts)]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        begin, end, _ = span.indices(len(self))
        number = max(0, bisect_right(self._starts, begin) - 1)
        pieces = []
        while begin < end:
            start, stop = self._starts[number], self._starts[number + 1]
            pieces.append(self._parts[number][begin - start : min(end, stop) - start])
            begin, number = max(begin, min(end, stop)), number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


def check_alike(parts: Sequence[ShardReader]) -> None:
    """ShardError if shards of different dtypes or tokenizers would become one data set."""
    first = parts[0]
    told = [(read_manifest(part.prefix) or {}).get("tokenizer_fingerprint") for part in parts]
    for part, fingerprint in zip(parts, told, strict=True):
        if part.dtype != first.dtype:
            raise ShardError(
                f"{part.prefix}: holds {part.dtype.name}, {first.prefix} {first.dtype.name}: they "
                "were made with different tokenizers"
            )
        known = [each for each in told if each is not None]
        if fingerprint is not None and fingerprint != known[0]:
            raise ShardError(f"{part.prefix}: was made with another tokenizer than {first.prefix}")


def merge(prefixes: Sequence[str], output: str | os.PathLike) -> tuple[int, int]:
    """Write the shards `prefixes`, in order, as one; return (documents, tokens)."""
    if Path(f"{output}.idx").exists():
        raise ShardError(f"{output}.idx: exists already; remove it, or choose another name")
    parts = [ShardReader(prefix) for prefix in prefixes]
    check_alike(parts)
    manifests = [read_manifest(prefix) for prefix in prefixes]
    _check_partitions(prefixes, manifests)
    try:
        return _written(prefixes, output, parts, manifests)
    except OSError as error:  # a full disk's names no file
        if error.filename:
            raise
        raise ShardError(f"{output}: {error}; nothing is written") from error


def _written(
    prefixes: Sequence[str],
    output: str | os.PathLike,
    parts: list[ShardReader],
    manifests: list[dict | None],
) -> tuple[int, int]:
    with ShardWriter(output, parts[0].dtype.newbyteorder("=")) as writer:
        for part in parts:
            writer.add_documents(part.tokens[:0], part.sizes)
            for start in range(0, len(part.tokens), _COPY):
                writer.add_documents(part.tokens[start : start + _COPY], part.sizes[:0])
        if all(manifests):
            writer.manifest = to_bytes(_merged(prefixes, manifests))
        if not writer.documents:
            raise ShardError(f"{', '.join(prefixes)}: no document in them; nothing is written")
        return writer.documents, writer.tokens


def _merged(prefixes: Sequence[str], manifests: list[dict]) -> dict:
    counted = ("documents", "empty_documents", "left_out_by_set", "tokens", "text_bytes")
    sums = {key: sum(each.get(key, 0) for each in manifests) for key in counted}
    sources = [each["source"] for each in manifests]
    names = [Path(prefix).name for prefix in prefixes]
    return {**manifests[0], **sums, "source": {"merged": dict(zip(names, sources, strict=True))}}


def _check_partitions(prefixes: Sequence[str], manifests: list[dict | None]) -> None:
    """Partitions must be all of them, in order, each beginning where the one before ended."""
    told = [((each or {}).get("source") or {}).get("partition") for each in manifests]
    if not any(told):
        return
    if not all(told) or [each["part"] for each in told] != list(range(1, told[0]["of"] + 1)):
        found = [each and f"{each['part']}/{each['of']}" for each in told]
        raise ShardError(f"not all partitions of one run, in order: found {found}")
    end = None
    for prefix, each in zip(prefixes, told, strict=True):
        if each["begin"] is None:
            continue
        source, number = each["begin"]
        follows = end is None or [source, number] == [end[0], end[1] + 1]
        if not follows and not (source > end[0] and number == 1):
            raise ShardError(
                f"{prefix}: begins at chunk {each['begin']}, the one before ended at {end}: the "
                "partitions were not cut from the same inputs; prepare them again"
            )
        end = each["end"]
