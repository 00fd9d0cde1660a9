"""Merge several token shards into one shard on disk."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.data.errors import ShardError
from megatron.data.shards.joined import check_compatible
from megatron.data.shards.manifest import COUNTS, partition_of, read_manifest, to_bytes
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter


def merge(prefixes: Sequence[str], output: str | os.PathLike) -> tuple[int, int]:
    """Merge token shards into one new shard, with their documents in the given order.

    Args:
        prefixes: The paths of the shards to merge, without .bin or .idx.
        output: The path of the new shard, without .bin or .idx.

    Returns:
        The numbers of documents and tokens in the new shard.

    Raises:
        ShardError: `output` exists, the disk is full, or the shards cannot be merged. For example,
            shards of different dtypes or tokenizers cannot be merged.
    """
    # The shards cannot be merged either if all are empty, or if a partition of a preparation run is
    # missing. If each merged shard has a manifest, the new shard gets one that combines them.
    if Path(f"{output}.idx").exists():
        raise ShardError(f"{output}.idx: exists already; remove it, or choose another name")
    readers = [ShardReader(prefix) for prefix in prefixes]
    check_compatible(readers)
    manifests = [read_manifest(prefix) for prefix in prefixes]
    _check_partitions(prefixes, [partition_of(manifest) for manifest in manifests])
    try:
        with ShardWriter(output, readers[0].dtype.newbyteorder("=")) as writer:
            for reader in readers:
                writer.add_documents(reader.tokens, reader.sizes)
            known = [each for each in manifests if each]
            if len(known) == len(readers):
                sums = {key: sum(each.get(key, 0) for each in known) for key in COUNTS}
                merged = dict(zip(prefixes, (each["source"] for each in known), strict=True))
                sums["append_eod"] = all(each.get("append_eod", True) for each in known)
                writer.manifest = to_bytes({**known[0], **sums, "source": {"merged": merged}})
            if not writer.documents:
                raise ShardError(f"{', '.join(prefixes)}: no document in them; nothing is written")
            return writer.documents, writer.tokens
    except OSError as error:
        if error.filename:
            raise
        # For a full disk, the operating system's error names no file.
        raise ShardError(f"{output}: {error}; nothing is written") from error


def _check_partitions(prefixes: Sequence[str], partitions: Sequence[dict | None]) -> None:
    """Check that the shards are all parts of one corpus, in order and without a gap.

    Args:
        prefixes: The paths of the shards, for error messages.
        partitions: Which part each shard contains. None means that the shard is a whole corpus.

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
