"""Show statistics and the first documents of token shards, and check the shards' integrity.

    python tools/inspect_shards.py data/mine_text_document -v vocab.json -m merges.txt

The tool prints counts, and percentiles of the documents' lengths. If you pass the files of the
tokenizer that wrote the shards, the tool also prints documents as text. It reads the tokenizer's
type from the shards' manifest, and refuses files of another tokenizer. Every token is read once, to
check that all tokens are in the vocabulary. The exit code is 1 if anything is wrong.
"""

import argparse

from megatron import entry

# isort: split
import numpy as np

from megatron.data.errors import ShardError
from megatron.data.shards.manifest import check_tokenizer, read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer

_BLOCK = 1 << 24  # number of tokens that are checked at a time
_BARE = ("ByteLevelTokenizer", "CharLevelTokenizer")  # tokenizers without vocabulary files


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line, and return the arguments."""
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("prefix", help="common path of .bin and .idx")
    add("-t", "--tokenizer", help="tokenizer type [the manifest's]")
    add("-v", "--vocab-file")
    add("-m", "--merge-file")
    add("-n", "--documents", type=int, default=3, help="documents to print [%(default)s]")
    add("--characters", type=int, default=400, help="of each [%(default)s]")
    return parser.parse_args(argv)


@entry.reports
def main(argv: list[str] | None = None) -> int:
    """Inspect the shards that the command line names, and return exit code 0."""
    arguments = parse_arguments(argv)
    shards = ShardReader(arguments.prefix)
    manifest = read_manifest(arguments.prefix)
    print_counts(shards, manifest)
    tokenizer = tokenizer_for(arguments, manifest)
    if tokenizer is not None:
        check_tokenizer(arguments.prefix, tokenizer)
    vocab_size = tokenizer.vocab_size if tokenizer else (manifest or {}).get("vocab_size")
    check_tokens(shards, manifest, vocab_size)
    if tokenizer is None:
        print("documents: give the tokenizer (-t, -v, -m) to see them decoded")
    else:
        print_documents(shards, tokenizer, arguments.documents, arguments.characters)
    print("integrity: the files are whole and belong together")
    return 0


def tokenizer_for(arguments: argparse.Namespace, manifest: dict | None) -> Tokenizer | None:
    """Build the tokenizer of the shards. If its type or its files are unknown, return None.

    Args:
        arguments: The parsed command line.
        manifest: The description of the shards, or None.
    """
    kind = arguments.tokenizer or (manifest or {}).get("tokenizer")
    if kind is None or (kind not in _BARE and not arguments.vocab_file):
        return None
    return build_tokenizer(kind, arguments.vocab_file, arguments.merge_file)


def print_counts(shards: ShardReader, manifest: dict | None) -> None:
    """Print the numbers of documents and tokens, document lengths, and facts from the manifest.

    Args:
        shards: The shards.
        manifest: The description of the shards, or None.
    """
    print(f"{shards.prefix}: {len(shards):,} documents, {len(shards.tokens):,} tokens")
    print(f"dtype: {shards.dtype.name}; {shards.tokens.nbytes / 1e6:,.1f} MB")
    if len(shards):
        marks = np.percentile(shards.sizes, [0, 10, 50, 90, 99, 100])
        names = ("shortest", "10%", "median", "90%", "99%", "longest")
        found = ", ".join(f"{n} {m:,.0f}" for n, m in zip(names, marks, strict=True))
        print(f"tokens a document: {found}, mean {shards.sizes.mean():,.1f}")
    if manifest is None:
        print("manifest: none (the shards are not of prepare_data.py)")
        return
    print(f"tokenizer: {manifest['tokenizer']} {manifest['tokenizer_fingerprint'][:12]}")
    if manifest.get("text_bytes"):
        per_token = manifest["text_bytes"] / max(1, manifest["tokens"])
        print(f"text: {manifest['text_bytes'] / 1e6:,.1f} MB, {per_token:.2f} bytes a token")
    for key in ("empty_documents", "left_out_by_set"):
        if manifest.get(key):
            print(f"{key.replace('_', ' ')}: {manifest[key]:,}")
    source = manifest.get("source", {})
    print(f"source: {source.get('corpus', 'files')}; skipped {source.get('skipped', 0)}")


def check_tokens(shards: ShardReader, manifest: dict | None, vocab_size: int | None) -> None:
    """Check the numbers of documents and tokens, and the token ids.

    Args:
        shards: The shards to check.
        manifest: The description of the shards, with the expected numbers. With None, the numbers
            are not checked.
        vocab_size: The number of token ids in the vocabulary. With None, the token ids are not
            checked.

    Raises:
        ShardError: The manifest has other numbers, or a token is outside the vocabulary.
    """
    for key, found in (("documents", len(shards)), ("tokens", len(shards.tokens))):
        if manifest and manifest.get(key, found) != found:
            raise ShardError(
                f"{shards.prefix}.json: counts {manifest[key]:,} {key}, the shards hold {found:,}: "
                "they are not of one run"
            )
    for start in range(0, len(shards.tokens), _BLOCK):
        block = shards.tokens[start : start + _BLOCK]
        if vocab_size is not None and not 0 <= int(block.min()) <= int(block.max()) < vocab_size:
            raise ShardError(
                f"{shards.prefix}.bin: token {block.max()} near token {start:,} is outside the "
                f"vocabulary of {vocab_size}"
            )


def print_documents(shards: ShardReader, tokenizer: Tokenizer, count: int, characters: int) -> None:
    """Print the first `count` documents as text, with at most `characters` characters of each."""
    for i in range(min(count, len(shards))):
        # Four tokens for each character are enough, because hardly any token is shorter than a
        # quarter of a character.
        text = tokenizer.decode(shards.get(i)[: characters * 4])
        shown = text if len(text) <= characters else f"{text[:characters]}..."
        print(f"--- document {i}, {int(shards.sizes[i]):,} tokens\n{shown}")


if __name__ == "__main__":
    entry.run(main)
