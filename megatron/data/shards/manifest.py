"""PREFIX.json, the manifest beside the shards: their tokenizer, counts and sources."""

from __future__ import annotations

import json
import os

from megatron.data.errors import ShardError
from megatron.data.shards.format import shard_path
from megatron.data.tokenizers.base import Tokenizer


def build_manifest(tokenizer: Tokenizer, append_eod: bool, counts: dict, source: dict) -> dict:
    """The manifest of shards made with `tokenizer`.

    Args:
        append_eod: whether each document ends with the tokenizer's end-of-document token.
        counts: documents, tokens and so on.
        source: the corpus or files, and what was skipped; of a partition, also `partition`.
    """
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
    """The content of PREFIX.json."""
    return (json.dumps(manifest, indent=2) + "\n").encode()


def read_manifest(prefix: str | os.PathLike) -> dict | None:
    """The manifest of the shards, or None: other programs write none.

    Raises:
        ShardError: the file is damaged.
    """
    path = shard_path(prefix, ".json")
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardError(
            f"{path}: is not a manifest ({error}); remove it, or rebuild the data"
        ) from None
    return manifest if isinstance(manifest, dict) and "tokenizer_fingerprint" in manifest else None


def partition_of(manifest: dict | None) -> dict | None:
    """The partition that a manifest describes, or None: keys `part`, `of`, `begin` and `end`.

    `part` counts from 1 to `of`. `begin` and `end` are the partition's first and last chunk as
    [source, number], None if it has no chunk.
    """
    return ((manifest or {}).get("source") or {}).get("partition")


def check_tokenizer(prefix: str | os.PathLike, tokenizer: Tokenizer) -> None:
    """Check that the manifest of the shards, if there is one, names this tokenizer.

    Raises:
        ShardError: it names another one.
    """
    manifest = read_manifest(prefix)
    if manifest and manifest["tokenizer_fingerprint"] != tokenizer.fingerprint():
        raise ShardError(
            f"{prefix}: was made with {manifest.get('tokenizer')} (fingerprint "
            f"{manifest['tokenizer_fingerprint'][:12]}), not with this run's {tokenizer.name} "
            f"({tokenizer.fingerprint()[:12]}): set tokenizer_type, vocab_file and merge_file to "
            "those of the data, or prepare the data again"
        )
