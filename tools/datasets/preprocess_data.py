"""Tokenise text files into shards, with the flags of gpt-neox's `preprocess_data.py`.

    python tools/datasets/preprocess_data.py --input a.jsonl.zst,b.jsonl \\
        --output-prefix data/mine --vocab-file vocab.json --merge-file merges.txt \\
        --tokenizer-type GPT2BPETokenizer --dataset-impl mmap --append-eod --workers 8

The tool writes PREFIX_KEY_document.bin and .idx for each key of --jsonl-keys (default: text). The
files are byte for byte those that gpt-neox writes, except where gpt-neox loses or damages text:

- A faulty record or a truncated archive is an error. (gpt-neox stops with a traceback, or reads a
  truncated archive as a shorter one.)
- All frames of a .zst file are read. (gpt-neox reads only the first frame.)
- Each line of a .jsonl.gz file is parsed as a JSON record. (gpt-neox tokenises the JSON source.)
- Each key of --jsonl-keys is read from the records. (gpt-neox writes the key "text" to every file.)
- A record whose text is empty under one key is left out of that key's shards only.

The flags --on-error, --backend, --max-document-bytes and --max-expansion are not in gpt-neox.
"""

import argparse

from megatron import entry
from megatron.data.prepare.chunks import Limits
from megatron.data.prepare.command import add_shared_flags, exit_code
from megatron.data.prepare.encode import EncodeOptions
from megatron.data.prepare.sources import find_sources
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.tokenizers.build import TYPES, build_tokenizer


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line, and return the arguments."""
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("--input", required=True, action="append", help="files, globs or folders, joined by commas")
    add("--jsonl-keys", nargs="+", default=["text"], help="keys to write, each to its own shards")
    add("--num-docs", type=int, help="accepted; progress is measured in bytes")
    add("--tokenizer-type", required=True, choices=TYPES)
    add("--vocab-file")
    add("--merge-file")
    add("--append-eod", action="store_true", help="end each document with the eod token")
    add("--output-prefix", required=True, help="path of the shards, without _KEY_document")
    add("--dataset-impl", default="mmap", choices=["mmap"])
    add("--workers", type=int, default=1)
    add("--log-interval", type=int, default=100, help="accepted; progress is always shown")
    add_shared_flags(parser)
    arguments = parser.parse_args(argv)
    if len(set(arguments.jsonl_keys)) < len(arguments.jsonl_keys):
        parser.error(f"--jsonl-keys {' '.join(arguments.jsonl_keys)}: a key is given twice")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Tokenise the files that the command line names, and return the exit code."""
    arguments = parse_arguments(argv)
    return exit_code(lambda: prepare(arguments))


def prepare(arguments: argparse.Namespace) -> int:
    """Tokenise the input files, write the shards of every key, and return exit code 0."""
    keys = tuple(arguments.jsonl_keys)
    sources = find_sources(",".join(arguments.input).split(","))
    tokenizer = build_tokenizer(
        arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file, arguments.backend
    )
    print(f"Vocab size: {tokenizer.vocab_size}\nOutput prefix: {arguments.output_prefix}")
    prefixes = [f"{arguments.output_prefix}_{key}_document" for key in keys]
    options = EncodeOptions(keys, arguments.append_eod, arguments.ftfy)
    Preparation(
        sources, prefixes, tokenizer, options, max(1, arguments.workers), arguments.on_error,
        limits=Limits(arguments.max_document_bytes, arguments.max_expansion),
    ).run()  # fmt: skip
    return 0


if __name__ == "__main__":
    entry.run(main)
