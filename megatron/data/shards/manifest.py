"""PREFIX.json, the manifest beside the shards: what the tokens are, and where they come from."""

from __future__ import annotations

import json
import os

from megatron.data.errors import ShardError
from megatron.data.shards.format import shard_path
from megatron.data.tokenizers.base import Tokenizer


def build_manifest(tokenizer: Tokenizer, append_eod: bool, counts: dict, source: dict) -> dict:
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
    return (json.dumps(manifest, indent=2) + "\n").encode()


def read_manifest(prefix: str | os.PathLike) -> dict | None:
    """The manifest beside the shards, or None (others write none); ShardError if damaged."""
    path = shard_path(prefix, ".json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ShardError(
            f"{path}: is not a manifest ({error}); remove it, or rebuild the data"
        ) from None
    return manifest if isinstance(manifest, dict) and "tokenizer_fingerprint" in manifest else None


def check_tokenizer(prefix: str | os.PathLike, tokenizer: Tokenizer) -> None:
    """ShardError if the manifest says that another tokenizer made the shards."""
    manifest = read_manifest(prefix)
    if manifest and manifest["tokenizer_fingerprint"] != tokenizer.fingerprint():
        raise ShardError(
            f"{prefix}: was made with {manifest.get('tokenizer')} (fingerprint "
            f"{manifest['tokenizer_fingerprint'][:12]}), not with this run's {tokenizer.name} "
            f"({tokenizer.fingerprint()[:12]}): set tokenizer_type, vocab_file and merge_file to "
            "those of the data, or prepare the data again"
        )
