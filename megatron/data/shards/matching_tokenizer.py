"""Check that a token shard was made with the tokenizer of the run that reads it."""

import os

from megatron.data.errors import ShardError
from megatron.data.shards.manifest import read_manifest
from megatron.data.tokenizers.base import Tokenizer


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
