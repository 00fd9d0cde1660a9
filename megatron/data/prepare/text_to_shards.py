"""Encode text as token shards: PREFIX.bin, PREFIX.idx, and PREFIX.json, the manifest.

Readers split the inputs into chunks, worker processes encode the chunks, and the main process
writes the tokens in the order of the chunks. Empty documents are left out and counted, as in
GPT-NeoX's `preprocess_data.py`. If a run is killed, stops at a fault or fills the disk, the same
command continues that run. The number of workers and any interruptions do not change the shards.

A run can encode one of N partitions of the inputs. The bytes of the inputs are divided into N equal
ranges. Partition I consists of the chunks that end in range I. Merging the shards of all partitions
gives the shard of the complete run.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from pathlib import Path

from megatron.data.errors import CorpusError, DataError
from megatron.data.prepare.archive import ArchiveWriter
from megatron.data.prepare.chunks import CHUNK_BYTES, MAX_TEXTS, Chunk, Fault, Limits
from megatron.data.prepare.encode import CHUNK_COUNTS, Encoded, EncodeOptions, Encoder
from megatron.data.prepare.journal import Journal, State
from megatron.data.prepare.progress import LISTED, describe_skipped, progress_bar
from megatron.data.prepare.read_files import read_source
from megatron.data.prepare.sources import Source
from megatron.data.prepare.workers import Workers
from megatron.data.shards.format import shard_path
from megatron.data.shards.manifest import build_manifest, to_bytes
from megatron.data.shards.writer import ShardWriter
from megatron.data.tokenizers.base import Tokenizer


@dataclass
class Preparation:
    """A preparation run. `run` encodes the text of `sources` and writes the shards.

    Attributes:
        sources: The inputs, in the order in which their documents are written.
        prefixes: For each key of the records, the path of the key's shard without suffix.
        tokenizer: The tokenizer that encodes the text.
        encode: The options for encoding a record.
        workers: The number of worker processes. If it is 1, the main process encodes the text.
        on_error: "stop" to end the run at a faulty record or file, or "skip" to list the record or
            file and continue.
        partition: (i, n) selects partition i of n. Partitions are numbered from 1.
        checkpoint_seconds: The time between two updates of the journal.
        limits: The largest size of a document, and the largest ratio of the decompressed size of an
            input to its compressed size.
        archive: An archive to which the documents of the first key are also written, or None.
        about: Facts about the corpus, which the manifest of each shard records.
        label: The text before the progress bar.
    """

    # The keys are `encode.keys`. `about` is added to the entry `source` of each manifest.

    sources: list[Source]
    prefixes: Sequence[str | os.PathLike]
    tokenizer: Tokenizer
    encode: EncodeOptions = EncodeOptions()
    workers: int = 1
    on_error: str = "stop"
    partition: tuple[int, int] = (1, 1)
    checkpoint_seconds: float = 10.0
    limits: Limits = Limits()
    archive: ArchiveWriter | None = None
    about: dict = field(default_factory=dict)
    label: str = "tokenising"

    def __post_init__(self) -> None:
        self.part, self.parts = self.partition
        if self.parts > 1 and any(source.kind == "hub" for source in self.sources):
            raise CorpusError("a hub's data set has no bytes to share: --partition needs files")
        job = {
            "sources": [source.identity() for source in self.sources],
            "tokenizer": self.tokenizer.fingerprint(),
            "options": astuple(self.encode),
            "partition": self.partition,
            "chunks": [CHUNK_BYTES, MAX_TEXTS],  # chunk numbers depend on these
            "archive": self.archive and os.fspath(self.archive.folder),
        }
        self.journal = Journal(self.prefixes[0], job, self.checkpoint_seconds)
        self.skipped_path = shard_path(self.prefixes[0], ".skipped.txt")
        self.skipped_part = Path(f"{self.skipped_path}.part")
        counts: dict[str, int] = dict.fromkeys(CHUNK_COUNTS, 0)
        self.state = State(counts, [{} for _ in self.sources], [(0, 0)] * len(self.prefixes))
        self.ends = list(itertools.accumulate(source.size for source in self.sources))
        self.total = sum(source.size for source in self.sources)  # bytes of all inputs

    def run(self) -> list[dict]:
        """Write the shards, one for each key, and return their manifests.

        Raises:
            CorpusError: An input is faulty, no document has text, or the shards or the archive
                cannot be written.
        """
        # A faulty input is no error if faults are skipped. An incomplete shard never has an .idx
        # file.
        encoder = Encoder(self.tokenizer, self.encode, keep=self.archive is not None)
        with Workers(encoder, self.workers) as workers, ExitStack() as stack:
            self.writers = [
                stack.enter_context(ShardWriter(prefix, self.tokenizer.dtype))
                for prefix in self.prefixes
            ]
            archives = [stack.enter_context(self.archive)] if self.archive else []
            self.outputs = [*self.writers, *archives]
            try:
                self._resume()
                self.skipped = stack.enter_context(open(self.skipped_part, "a", encoding="utf-8"))
                with progress_bar(self.total // self.parts, self.label) as show:
                    for result in workers.map(self._chunks()):
                        self._write(result, show)
                return self._finish()
            except (OSError, DataError) as error:
                raise self.journal.explain(error) from error
            finally:
                for output in self.outputs:
                    output.keep_parts = self.journal.path.is_file()
                if not self.journal.path.is_file():
                    self.skipped_part.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Continue an interrupted run. If this is impossible, start again from the first chunk."""
        # An interrupted run leaves a journal and .part files.
        state = self.journal.read()
        self.skipped_part.touch()
        if state and all(out.holds(*n) for out, n in zip(self.outputs, state.kept, strict=False)):
            self.state = state
            text = f"going on after {state.counts['documents']:,} documents"
        else:
            why = self.journal.refused or "counts more than the .part files hold"
            path = self.journal.path
            text = f"{path}: {why}; starting over" if path.is_file() else ""
            self.journal.remove()
        if text:
            print(text, file=sys.stderr)
        for output, kept in zip(self.outputs, self.state.kept, strict=False):
            output.rewind(*kept)
        os.truncate(self.skipped_part, self.state.skipped_bytes)

    def _chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of this partition that are not yet written."""
        wanted, partitions = self.part - 1, self.parts
        first_source = self.state.done[0] if self.state.done else 0
        for index, (source, end) in enumerate(zip(self.sources, self.ends, strict=True)):
            if index < first_source or end * partitions < self.total * wanted:
                continue
            for number, chunk in enumerate(self._read(source, self.state.facts[index]), 1):
                chunk.source, chunk.number = index, number
                # A chunk belongs to the partition whose range contains the end of the chunk. The
                # end of the last input belongs to the last partition.
                ends_at = end - source.size + chunk.position
                found = min(partitions - 1, ends_at * partitions // max(1, self.total))
                if found > wanted:
                    return
                written = self.state.done and [index, number] <= self.state.done
                if found == wanted and not written:
                    yield chunk

    def _read(self, source: Source, facts: dict) -> Iterator[Chunk]:
        """Yield the chunks of one source. If reading fails, the last chunk contains the fault."""
        chunk = None
        try:
            for chunk in read_source(source, self.encode.keys, facts, self.limits):
                yield chunk
            # The last file that `lm_dataformat` commits may have no records, as may parquet files.
            if chunk is None and source.kind in ("tar", "zip", "hub"):
                raise Fault(source.path, "has no records")
        except Fault as error:
            position = chunk.position if chunk else 0
            yield Chunk(source.path, fault=str(error), position=position)

    def _write(self, result: Encoded, show: Callable[[int], None]) -> None:
        """Append the tokens of one chunk to the shards."""
        # If it is due, the journal is updated before that. A fault while reading cuts off the chunk
        # before it, so the journal must not count that chunk as written.
        if result.faults and self.on_error == "stop":
            raise CorpusError(result.faults[0])
        state = self.state
        if state.done and self.journal.due:
            state.written = [writer.sync() for writer in self.writers]
            self.skipped.flush()
            state.skipped_bytes = os.path.getsize(self.skipped_part)
            state.archive = self.archive.sync() if self.archive else 0
            self.journal.write(state)
        self.skipped.writelines(f"{fault}\n" for fault in result.faults)
        for writer, tokens, sizes in zip(self.writers, result.tokens, result.sizes, strict=True):
            writer.add_documents(tokens, sizes)
        if self.archive:
            self.archive.add(result.documents)
        for name, count in result.counts.items():
            state.counts[name] += count
        state.done = [result.source, result.number]
        state.begin = state.begin or state.done
        read = self.ends[result.source] - self.sources[result.source].size + result.position
        show(read - self.total * (self.part - 1) // self.parts)

    def _finish(self) -> list[dict]:
        """Complete the shards and the list of skipped records, and return the manifests."""
        faults = self.state.counts.pop("faults")
        if not self.state.counts["documents"]:
            self._report_no_documents(faults)
        manifests = self._manifests(faults)
        if self.archive:
            self.archive.sync()  # while a full disk can still be cured and the run continued
        self.skipped.flush()
        for writer, manifest in zip(self.writers, manifests, strict=True):
            writer.manifest = to_bytes(manifest)
        for output in self.outputs:
            output.finalize()
        if faults:
            os.replace(self.skipped_part, self.skipped_path)
            print(describe_skipped(self.skipped_path, faults), file=sys.stderr)
        else:
            self.skipped_part.unlink(missing_ok=True)
            self.skipped_path.unlink(missing_ok=True)
        self.journal.remove()
        return manifests

    def _report_no_documents(self, faults: int) -> None:
        """Raise the error that the inputs contain no document with text."""
        # If the run encodes one of several partitions, print a warning instead.
        causes = {
            "faulty records skipped": faults,
            "without text": self.state.counts["empty_documents"],
            "left out by --pile-set": self.state.counts["left_out_by_set"],
        }
        lost = ", ".join(f"{count:,} {cause}" for cause, count in causes.items() if count)
        paths = ", ".join(source.path for source in self.sources[:LISTED])
        paths += ", ..." * (len(self.sources) > LISTED)
        text = f"{paths}: no document with text in it{f' ({lost})' if lost else ''}"
        if self.parts == 1:
            raise CorpusError(f"{text}; nothing is written")
        print(f"partition {self.part}/{self.parts} of {text}", file=sys.stderr)

    def _manifests(self, faults: int) -> list[dict]:
        inputs = [
            {"path": source.path, "bytes": source.size, **fact}
            for source, fact in zip(self.sources, self.state.facts, strict=True)
        ]
        described = {**self.about, "files": inputs, "skipped": faults}
        if self.parts > 1:
            place = {"part": self.part, "of": self.parts}
            described["partition"] = {**place, "begin": self.state.begin, "end": self.state.done}
        return [
            build_manifest(
                self.tokenizer,
                self.encode.append_eod,
                {**self.state.counts, "documents": writer.documents, "tokens": writer.tokens},
                described if key == "text" else {**described, "key": key},
            )
            for writer, key in zip(self.writers, self.encode.keys, strict=True)
        ]
