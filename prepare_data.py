"""Turn text into token shards for training.

    python prepare_data.py builtin:python-stdlib -d data
    python prepare_data.py --input a.jsonl b.txt --name NAME -d data \\
        -t GPT2BPETokenizer -v vocab.json -m merges.txt

The second writes data/NAME_text_document.bin and .idx (data_path is their common path) and a .json
manifest that says what the tokens are. A .jsonl file holds one JSON object with the text a line, a
.txt file is one document.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from megatron.data.corpora import NAMES, PREFIX, prepare_builtin
from megatron.data.errors import CorpusError, DataError
from megatron.data.mmap import MMapIndexedDataset, shard_path
from megatron.data.prepare import check_inputs, text_documents, write_shards
from megatron.data.tokenizer import Tokenizer, build_tokenizer


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dataset", nargs="?", help=f"a corpus: {', '.join(PREFIX + name for name in NAMES)}"
    )
    parser.add_argument(
        "-d", "--data-dir", type=Path, default=Path("data"), help="folder for the shards [data]"
    )
    parser.add_argument(
        "-t", "--tokenizer", default="ByteLevelTokenizer", help="tokenizer type [%(default)s]"
    )
    parser.add_argument("-v", "--vocab-file", help="vocab.json, or tokenizer.json for HFTokenizer")
    parser.add_argument("-m", "--merge-file", help="merges.txt for GPT2BPETokenizer")
    parser.add_argument("--input", nargs="+", type=Path, help=".jsonl and .txt files")
    parser.add_argument("--name", help="name of the data set made from --input")
    parser.add_argument(
        "--text-key", default="text", help="key of the text in .jsonl lines [%(default)s]"
    )
    parser.add_argument(
        "--no-append-eod", action="store_true", help="do not end documents with eod"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a data set of the same name"
    )
    arguments = parser.parse_args(argv)
    if bool(arguments.dataset) == bool(arguments.input):
        parser.error(
            "give either a corpus (builtin:python-stdlib) or --input FILES with --name NAME"
        )
    if arguments.input and not arguments.name:
        parser.error("--input needs --name NAME, the name of the data set to make")
    if arguments.dataset and (arguments.name or arguments.no_append_eod or arguments.overwrite):
        parser.error("--name, --no-append-eod and --overwrite go with --input")
    if arguments.name and Path(arguments.name).name != arguments.name:
        parser.error(f"--name {arguments.name}: is a name, not a path; the folder is -d")
    if arguments.data_dir.is_file():
        parser.error(f"-d {arguments.data_dir}: is a file, not a folder")
    return arguments


def prepare_corpus(dataset: str, data_dir: Path, tokenizer: Tokenizer) -> str:
    if not dataset.startswith(PREFIX):
        near = difflib.get_close_matches(dataset, NAMES, n=1)
        hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
        raise CorpusError(
            f"{dataset}: unknown corpus; {hint}known: {', '.join(PREFIX + n for n in NAMES)}; "
            "text files of your own: --input FILES --name NAME"
        )
    return prepare_builtin(dataset[len(PREFIX) :], data_dir, tokenizer)


def prepare_files(arguments: argparse.Namespace, tokenizer: Tokenizer) -> str:
    prefix = str(arguments.data_dir / f"{arguments.name}_text_document")
    if shard_path(prefix, ".idx").exists() and not arguments.overwrite:
        raise CorpusError(
            f"{prefix}.idx: exists already; choose another --name, or add --overwrite"
        )
    total_bytes = check_inputs(arguments.input)
    write_shards(
        text_documents(arguments.input, arguments.text_key),
        prefix,
        tokenizer,
        append_eod=not arguments.no_append_eod,
        source={"files": [str(path) for path in arguments.input]},
        total_bytes=total_bytes,
        label=f"tokenising {arguments.name}",
    )
    return prefix


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        tokenizer = build_tokenizer(arguments.tokenizer, arguments.vocab_file, arguments.merge_file)
        if arguments.dataset:
            prefix = prepare_corpus(arguments.dataset, arguments.data_dir, tokenizer)
        else:
            prefix = prepare_files(arguments, tokenizer)
        shards = MMapIndexedDataset(prefix)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"data_path: {prefix}")
    print(
        f"{len(shards):,} documents, {len(shards.tokens):,} tokens "
        f"of {tokenizer.name} ({shards.dtype.name})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
