"""Encode text as token shards: PREFIX.bin, PREFIX.idx, and PREFIX.json, the manifest.

Readers split the inputs into chunks, worker processes encode the chunks, and the main process
writes the tokens in order. Empty documents are left out and counted, as in GPT-NeoX's
`preprocess_data.py`. If a run is killed, stops at a fault or fills the disk, the same command
continues that run. The number of workers and any interruptions do not change the shards.

A run can encode one of N partitions. The bytes of the inputs are divided into N equal ranges, and
partition I takes the chunks that end in range I. Merging the shards of all partitions gives the
shard of the complete run.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

from megatron.data.errors import CorpusError, DataError
from megatron.data.prepare.archive import ArchiveWriter
from megatron.data.prepare.chunks import CHUNK_BYTES, MAX_TEXTS, Chunk, Fault
from megatron.data.prepare.encode import COUNTS, Encoded, Encoder
from megatron.data.prepare.journal import Journal
from megatron.data.prepare.options import PrepareOptions
from megatron.data.prepare.progress import (
    ProgressBar,
    describe_nothing,
    describe_skipped,
    printable,
)
from megatron.data.prepare.read_files import read_source
from megatron.data.prepare.sources import Source
from megatron.data.prepare.workers import Workers
from megatron.data.shards.format import shard_path
from megatron.data.shards.manifest import build_manifest, to_bytes
from megatron.data.shards.writer import ShardWriter
from megatron.data.tokenizers.base import Tokenizer


def write_shards(
    sources: list[Source],
    prefixes: Sequence[str | os.PathLike],
    tokenizer: Tokenizer,
    options: PrepareOptions | None = None,
    *,
    archive: ArchiveWriter | None = None,
    about: dict | None = None,
    label: str = "tokenising",
) -> list[dict]:
    """Encode the text of `sources` and write one shard for each of `options.encode.keys`.

    Args:
        sources: The inputs, in the order in which their documents are written.
        prefixes: For each key, the path of its shard without suffix.
        tokenizer: The tokenizer that encodes the text.
        options: The options of the run, or None for the defaults.
        archive: The archive that also keeps the documents of the first key, or None.
        about: Facts about the corpus, which are added to the entry `source` of each manifest.
        label: The text before the progress bar.

    Returns:
        The manifest of each shard.

    Raises:
        CorpusError: an input is faulty (unless faults are skipped), no document has text, or the
            shards or the archive cannot be written. An incomplete shard never has an .idx file.
    """
    paths = [os.fspath(prefix) for prefix in prefixes]
    options = options or PrepareOptions()
    return _Run(sources, paths, tokenizer, options, archive, about or {}, label).run()


@dataclass
class _Run:
    sources: list[Source]
    prefixes: list[str]
    tokenizer: Tokenizer
    options: PrepareOptions
    archive: ArchiveWriter | None
    about: dict
    label: str

    def __post_init__(self) -> None:
        self.partition, self.partitions = self.options.partition
        if self.partitions > 1 and any(source.kind == "hub" for source in self.sources):
            raise CorpusError("a hub's data set has no bytes to share: --partition needs files")
        job = {
            "sources": [source.identity() for source in self.sources],
            "tokenizer": self.tokenizer.fingerprint(),
            "options": astuple(self.options.encode),
            "partition": self.options.partition,
            "chunks": [CHUNK_BYTES, MAX_TEXTS],  # chunk numbers depend on these
            "archive": self.archive and os.fspath(self.archive.folder),
        }
        self.journal = Journal(self.prefixes[0], job, self.options.checkpoint_seconds)
        self.skipped_path = shard_path(self.prefixes[0], ".skipped.txt")
        self.skipped_part = Path(f"{self.skipped_path}.part")
        self.facts: list[dict] = [{} for _ in self.sources]
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.first: list[int] | None = None  # (source, number) of the first chunk written
        self.last: list[int] | None = None  # (source, number) of the last chunk written
        self.ends = list(itertools.accumulate(source.size for source in self.sources))
        self.total = sum(source.size for source in self.sources)  # bytes of all inputs

    def run(self) -> list[dict]:
        encoder = Encoder(self.tokenizer, self.options.encode, keep=self.archive is not None)
        with Workers(encoder, self.options.workers) as workers, ExitStack() as stack:
            self.writers = [
                stack.enter_context(ShardWriter(prefix, self.tokenizer.dtype))
                for prefix in self.prefixes
            ]
            if self.archive:
                stack.callback(self.archive.close)
            self._resume()
            self.skipped = stack.enter_context(open(self.skipped_part, "a", encoding="utf-8"))
            try:
                with ProgressBar(
                    self.total // self.partitions, self.label, self.options.quiet
                ) as progress:
                    for result in workers.map(self._chunks()):
                        self._write(result, progress)
                return self._finish()
            except (OSError, DataError) as error:
                raise self.journal.explain(error) from error
            finally:
                for writer in self.writers:
                    writer.keep_parts = self.journal.exists
                if self.archive:
                    self.archive.keep_part = self.journal.exists
                if not self.journal.exists:
                    self.skipped_part.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Continue an interrupted run if its .part files hold what its journal records.

        Otherwise, start the run from its first chunk.
        """
        state = self.journal.read()
        resumable = (
            state is not None
            and (self.archive is None or self.archive.holds(state["archive"]))
            and all(
                writer.shared_name and writer.holds(*written)
                for writer, written in zip(self.writers, state["written"], strict=True)
            )
        )
        self.skipped_part.touch()
        if state is None or not resumable:
            if self.journal.exists and not self.options.quiet:
                why = self.journal.refused or "counts more than the .part files hold"
                print(f"{self.journal.path}: {why}; starting over", file=sys.stderr)
            self.journal.remove()
            state = {"written": [(0, 0)] * len(self.writers), "skipped_bytes": 0, "archive": 0}
        else:
            self.first, self.last, self.counts = state["begin"], state["done"], state["counts"]
            self.facts = state["facts"]
            if not self.options.quiet:
                print(f"going on after {self.counts['documents']:,} documents", file=sys.stderr)
        for writer, written in zip(self.writers, state["written"], strict=True):
            writer.rewind(*written)
        if self.archive:
            self.archive.begin(state["archive"])
        os.truncate(self.skipped_part, state["skipped_bytes"])

    def _chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of this partition, except those that an interrupted run wrote."""
        wanted, partitions = self.partition - 1, self.partitions
        first_source = self.last[0] if self.last else 0
        for index, (source, end) in enumerate(zip(self.sources, self.ends, strict=True)):
            if index < first_source or end * partitions < self.total * wanted:
                continue
            for number, chunk in enumerate(self._read(source, self.facts[index]), 1):
                chunk.source, chunk.number = index, number
                # A chunk belongs to the partition whose range contains the end of the chunk. The
                # end of the last input belongs to the last partition.
                ends_at = end - source.size + chunk.position
                found = min(partitions - 1, ends_at * partitions // max(1, self.total))
                if found > wanted:
                    return
                written = self.last and [index, number] <= self.last
                if found == wanted and not written:
                    yield chunk

    def _read(self, source: Source, facts: dict) -> Iterator[Chunk]:
        """Yield the chunks of one source. If reading fails, the last chunk contains the fault."""
        chunk = None
        try:
            for chunk in read_source(source, self.options.encode.keys, facts, self.options.limits):
                yield chunk
            # A text file may be empty, as __init__.py is; an archive without records is a mistake.
            if chunk is None and source.kind != "text":
                raise Fault(source.path, "has no records")
        except Fault as error:
            position = chunk.position if chunk else 0
            yield Chunk(source.path, fault=str(error), position=position)

    def _write(self, result: Encoded, progress: ProgressBar) -> None:
        """Append the tokens of one chunk to the shards. Update the journal if it is due."""
        faults = [printable(fault) for fault in result.faults]
        if faults and self.options.on_error == "stop":
            raise CorpusError(faults[0])
        for fault in faults:
            self.skipped.write(fault + "\n")
        for writer, tokens, sizes in zip(self.writers, result.tokens, result.sizes, strict=True):
            writer.add_documents(tokens, sizes)
        if self.archive:
            self.archive.add(result.documents)
        for name, count in result.counts.items():
            self.counts[name] += count
        self.last = [result.source, result.number]
        self.first = self.first or self.last
        read = self.ends[result.source] - self.sources[result.source].size + result.position
        progress.show(read - self.total * (self.partition - 1) // self.partitions, self.counts)
        if self.journal.due:
            written = [writer.sync() for writer in self.writers]
            self.skipped.flush()
            state = {
                "done": self.last,
                "begin": self.first,
                "written": written,
                "counts": self.counts,
                "facts": self.facts,
                "skipped_bytes": os.path.getsize(self.skipped_part),
                "archive": self.archive.sync() if self.archive else 0,
            }
            self.journal.write(state)

    def _finish(self) -> list[dict]:
        """Complete the shards and the list of skipped records, and return the manifests."""
        faults = self.counts.pop("faults")
        if not self.counts["documents"]:
            self._report_no_documents(faults)
        manifests = self._manifests(faults)
        if self.archive:
            self.archive.sync()  # while a full disk can still be cured and the run continued
        self.skipped.flush()
        if faults:
            os.replace(self.skipped_part, self.skipped_path)
            print(describe_skipped(self.skipped_path, faults), file=sys.stderr)
        else:
            self.skipped_part.unlink(missing_ok=True)
            self.skipped_path.unlink(missing_ok=True)
        for writer, manifest in zip(self.writers, manifests, strict=True):
            writer.manifest = to_bytes(manifest)
            writer.keep_parts = self.journal.exists
            writer.finalize()
        if self.archive:
            self.archive.finish()
        self.journal.remove()
        return manifests

    def _report_no_documents(self, faults: int) -> None:
        """Raise CorpusError, or only print a warning if the run has several partitions.

        One of several partitions may be empty while the others have documents.
        """
        causes = {
            "faulty records skipped": faults,
            "without text": self.counts["empty_documents"],
            "left out by --pile-set": self.counts["left_out_by_set"],
        }
        text = describe_nothing([source.path for source in self.sources], causes)
        if self.partitions == 1:
            raise CorpusError(f"{text}; nothing is written")
        print(f"partition {self.partition}/{self.partitions} of {text}", file=sys.stderr)

    def _manifests(self, faults: int) -> list[dict]:
        inputs = [
            {"path": source.path, "bytes": source.size, **fact}
            for source, fact in zip(self.sources, self.facts, strict=True)
        ]
        described = {**self.about, "files": inputs, "skipped": faults}
        if self.partitions > 1:
            place = {"part": self.partition, "of": self.partitions}
            described["partition"] = {**place, "begin": self.first, "end": self.last}
        encode = self.options.encode
        return [
            build_manifest(
                self.tokenizer,
                encode.append_eod,
                {**self.counts, "documents": writer.documents, "tokens": writer.tokens},
                described if key == "text" else {**described, "key": key},
            )
            for writer, key in zip(self.writers, encode.keys, strict=True)
        ]
