"""Merge several token shards into one shard on disk."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.data.errors import ShardError
from megatron.data.shards.joined import check_compatible
from megatron.data.shards.manifest import COUNTS, partition_of, read_manifest, to_bytes
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter

_TOKENS_AT_ONCE = 1 << 24


def merge(prefixes: Sequence[str], output: str | os.PathLike) -> tuple[int, int]:
    """Merge token shards into one new shard, with their documents in the given order.

    Args:
        prefixes: The paths of the shards to merge, without .bin or .idx.
        output: The path of the new shard, without .bin or .idx.

    Returns:
        The numbers of documents and tokens in the new shard.

    Raises:
        ShardError: `output` exists, the disk is full, or the shards cannot be merged. For example,
            they differ in dtype or tokenizer.
    """
    # The shards cannot be merged either if all are empty, or if a partition of a preparation run is
    # missing.
    if Path(f"{output}.idx").exists():
        raise ShardError(f"{output}.idx: exists already; remove it, or choose another name")
    readers = [ShardReader(prefix) for prefix in prefixes]
    check_compatible(readers)
    manifests = [read_manifest(prefix) for prefix in prefixes]
    _check_partitions(prefixes, [partition_of(manifest) for manifest in manifests])
    try:
        with ShardWriter(output, readers[0].dtype.newbyteorder("=")) as writer:
            return _copy(readers, [each for each in manifests if each], writer)
    except OSError as error:
        if error.filename:
            raise
        # For a full disk, the operating system's error names no file.
        raise ShardError(f"{output}: {error}; nothing is written") from error


def _copy(
    readers: Sequence[ShardReader], manifests: Sequence[dict], writer: ShardWriter
) -> tuple[int, int]:
    """Append all documents of `readers` to `writer`. The caller must finalize the writer.

    Args:
        readers: The shards to merge, in the order of their documents.
        manifests: The manifests of the shards.
        writer: The writer of the new shard.

    Returns:
        The numbers of documents and tokens in the new shard.

    Raises:
        ShardError: The shards to merge contain no document.
    """
    # `manifests` has no entry for a shard without manifest. If each merged shard has a manifest,
    # the new shard gets a manifest that combines all of them.
    for reader in readers:
        writer.add_documents(reader.tokens[:0], reader.sizes)
        for start in range(0, len(reader.tokens), _TOKENS_AT_ONCE):
            tokens = reader.tokens[start : start + _TOKENS_AT_ONCE]
            writer.add_documents(tokens, reader.sizes[:0])
    prefixes = [reader.prefix for reader in readers]
    if len(manifests) == len(readers):
        sums = {key: sum(each.get(key, 0) for each in manifests) for key in COUNTS}
        names = [Path(prefix).name for prefix in prefixes]
        sources = [each["source"] for each in manifests]
        merged = {"merged": dict(zip(names, sources, strict=True))}
        writer.manifest = to_bytes({**manifests[0], **sums, "source": merged})
    if not writer.documents:
        raise ShardError(f"{', '.join(prefixes)}: no document in them; nothing is written")
    return writer.documents, writer.tokens


def _check_partitions(prefixes: Sequence[str], partitions: Sequence[dict | None]) -> None:
    """Check that the shards are all parts of one corpus, in order and without a gap.

    Args:
        prefixes: The paths of the shards, for error messages.
        partitions: Which part each shard holds. None means that the shard is a whole corpus.

    Raises:
        ShardError: A part is missing or out of order, or the parts were made from different inputs.
    """
    # `partitions` are results of `manifest.partition_of`. If no shard is a partition, there is
    # nothing to check.
    known = [each for each in partitions if each]
    if not known:
        return
    numbers = [each["part"] for each in known]
    if len(known) < len(partitions) or numbers != list(range(1, known[0]["of"] + 1)):
        found = [each and f"{each['part']}/{each['of']}" for each in partitions]
        raise ShardError(f"not all partitions of one run, in order: found {found}")
    end: list[int] | None = None
    for prefix, each in zip(prefixes, known, strict=True):
        if each["begin"] is None:  # this partition has no chunks
            continue
        source, number = each["begin"]
        if end is not None and (
            [source, number] != [end[0], end[1] + 1] and not (source > end[0] and number == 1)
        ):
            raise ShardError(
                f"{prefix}: begins at chunk {each['begin']}, the one before ended at {end}: the "
                "partitions were not cut from the same inputs; prepare them again"
            )
        end = each["end"]
