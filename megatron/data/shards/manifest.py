"""The manifest PREFIX.json, which records the tokenizer, counts and sources of a token shard."""

import json
import os

from megatron.data.errors import ShardError
from megatron.data.shards.format import shard_path
from megatron.data.tokenizers.base import Tokenizer
from megatron.files import parse_json

COUNTS = ("documents", "empty_documents", "left_out_by_set", "tokens", "text_bytes")
"""The keys of a manifest whose values are counts. When shards are merged, the counts are added."""
_MOST_PARTITIONS = 1 << 20


def build_manifest(tokenizer: Tokenizer, append_eod: bool, counts: dict, source: dict) -> dict:
    """Return the manifest of a token shard, a dict that records how the shard was made.

    Args:
        tokenizer: The tokenizer that made the shard.
        append_eod: Whether each document ends with the tokenizer's end-of-document token.
        counts: Maps what was counted, such as "documents", to its count.
        source: A dict that describes the encoded files.
    """
    # The keys of `counts` are `COUNTS`. If the shard is one of several partitions, the key
    # `partition` of `source` describes that partition.
    return {
        "format": 1,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "append_eod": append_eod,
        "dtype": tokenizer.dtype.name,
        **counts,
        "source": source,
    }


def to_bytes(manifest: dict) -> bytes:
    """Return `manifest` as JSON."""
    # This is the content of the file PREFIX.json.
    return (json.dumps(manifest, indent=2) + "\n").encode()


def read_manifest(prefix: str | os.PathLike) -> dict | None:
    """Read the manifest of the shard with this prefix.

    Returns:
        The manifest, or None if the file PREFIX.json does not exist.

    Raises:
        ShardError: The file PREFIX.json is not valid JSON, or has values of wrong types.
    """
    # Shards that another program wrote have no manifest.
    path = shard_path(prefix, ".json")
    if not path.is_file():
        return None
    try:
        manifest = parse_json(path.read_bytes())
    except ValueError as error:
        raise ShardError(
            f"{path}: is not a manifest ({error}); remove it, or rebuild the data"
        ) from None
    if not isinstance(manifest, dict) or "tokenizer_fingerprint" not in manifest:
        return None
    numbers = [manifest.get(name, 0) for name in COUNTS]
    source = manifest.setdefault("source", {})
    named = isinstance(manifest["tokenizer_fingerprint"], str)
    valid = named and all(type(number) is int for number in numbers)
    if not (valid and isinstance(source, dict) and _is_partition(source.get("partition"))):
        raise ShardError(f"{path}: has values of wrong types; remove it, or rebuild the data")
    return manifest


def _is_partition(value: object) -> bool:
    """Return whether `value` is None or a valid description of a partition.

    `partition_of` documents the entries of a description.
    """
    match value:
        case None:
            return True
        case {
            "part": int(part),
            "of": int(of),
            "begin": None | [int(), int()],
            "end": None | [int(), int()],
        }:
            return 1 <= part <= of < _MOST_PARTITIONS
    return False


def partition_of(manifest: dict | None) -> dict | None:
    """Return which part of a corpus a shard contains, or None if it contains the whole corpus.

    The result is a dict with four keys:

    - `part`: The number of this part, counted from 1.
    - `of`: The number of all parts.
    - `begin`: The first chunk of the part, as [index of the input from 0, number of the
      chunk in this input from 1].
    - `end`: The last chunk of the part, in the same form.
    """
    # It is the manifest's entry `partition`. A preparation run can be divided into partitions, and
    # each partition is written to a shard of its own. `begin` and `end` are None if the partition
    # has no chunk.
    return ((manifest or {}).get("source") or {}).get("partition")


def check_tokenizer(prefix: str | os.PathLike, tokenizer: Tokenizer) -> None:
    """Check that the shard with this prefix was made with `tokenizer`.

    Raises:
        ShardError: The manifest of the shard names another tokenizer.
    """
    # A shard without a manifest is accepted.
    manifest = read_manifest(prefix)
    if manifest and manifest["tokenizer_fingerprint"] != tokenizer.fingerprint():
        raise ShardError(
            f"{prefix}: was made with {manifest.get('tokenizer')} (fingerprint "
            f"{manifest['tokenizer_fingerprint'][:12]}), not with this run's {tokenizer.name} "
            f"({tokenizer.fingerprint()[:12]}): set tokenizer_type, vocab_file and merge_file to "
            "those of the data, or prepare the data again"
        )
