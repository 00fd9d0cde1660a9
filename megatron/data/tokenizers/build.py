"""Build a tokenizer from the name of its type and the paths of its files."""

from pathlib import Path

from megatron.config.choices import TOKENIZERS, TOKENIZERS_NOT_BUILT
from megatron.data.errors import TokenizerError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer, CharLevelTokenizer
from megatron.shipped import find
from megatron.suggest import nearest

TYPES = tuple(sorted(TOKENIZERS.split()))


def build_tokenizer(
    type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    backend: str = "auto",
) -> Tokenizer:
    """Build a tokenizer from the name of its type and the paths of its files.

    Args:
        type: One of GPT-NeoX's names, which are listed in `TYPES`. Case is ignored.
        vocab_file: The path of the vocab.json, tokenizer.json or .model file. The tokenizers that
            work on bytes ignore it.
        merge_file: The path of the merges.txt, for GPT2BPETokenizer only.
        backend: The library that encodes, one of `fast_bpe.BACKENDS`, for GPT2BPETokenizer only.

    Raises:
        TokenizerError: The type is unknown, or a file is missing or damaged.
    """
    by_lower = {name.lower(): name for name in (*TYPES, *TOKENIZERS_NOT_BUILT)}
    lower, known = (type or "").lower(), ", ".join(TYPES)
    name = by_lower.get(lower)
    if name in TOKENIZERS_NOT_BUILT:
        raise TokenizerError(f"tokenizer_type: {name} is not built yet; use one of {known}")
    if name is None:
        prefixed = (each for each in by_lower if lower and each.startswith(lower))
        near = nearest(lower, by_lower) or next(prefixed, None)
        hint = f"did you mean {by_lower[near]}? " if near else ""
        raise TokenizerError(f"tokenizer_type: unknown type {type!r}; {hint}known: {known}")
    if name == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if name == "CharLevelTokenizer":
        return CharLevelTokenizer()
    # Imported only here, because these modules import libraries that not every run needs.
    if name == "SPMTokenizer":
        from megatron.data.tokenizers.sentencepiece import SPMTokenizer

        return SPMTokenizer(_required(name, "vocab_file", vocab_file, "tokenizer.model"))
    from megatron.data.tokenizers.bpe import GPT2BPETokenizer, HFTokenizer

    if name == "HFTokenizer":
        return HFTokenizer(_required(name, "vocab_file", vocab_file, "tokenizer.json"))
    return GPT2BPETokenizer(
        _required(name, "vocab_file", vocab_file, "vocab.json"),
        _required(name, "merge_file", merge_file, "merges.txt"),
        backend,
    )


def _required(name: str, key: str, path: str | Path | None, usual: str) -> Path:
    if path is None:
        flag = f"--{key.replace('_', '-')}"
        raise TokenizerError(f"{key} ({flag}): {name} needs it (usually called {usual})")
    if not (found := find(path)).is_file():
        raise TokenizerError(f"{key}: {path}: no such file")
    return found
