"""Text to a data set of tokens: PREFIX.bin, PREFIX.idx and PREFIX.json, the manifest.

Readers cut the inputs into chunks, worker processes encode them, and this process writes what comes
back, in order. Each document is closed by the tokenizer's eod; empty documents are left out, as
GPT-NeoX's `preprocess_data.py` does, and counted. A run that was killed, stopped at a fault or
found the disk full goes on where it stopped when the same command is given again, and the files are
those of an unbroken run, byte for byte, whatever the number of workers.

Partition I of N takes the chunks that end in the I-th N-th of the inputs' bytes, so the partitions
one after the other are the unpartitioned data set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron.data.errors import CorpusError, DataError
from megatron.data.prepare.chunks import CHUNK_BYTES, MAX_TEXTS, Chunk, Fault
from megatron.data.prepare.encode import COUNTS, Encoded, EncodeOptions, Encoder
from megatron.data.prepare.journal import Journal
from megatron.data.prepare.progress import Progress, describe_nothing, describe_skipped
from megatron.data.prepare.read_files import read_source
from megatron.data.prepare.sources import Source
from megatron.data.prepare.workers import Workers
from megatron.data.shards.format import shard_path
from megatron.data.shards.manifest import build_manifest, to_bytes
from megatron.data.shards.writer import ShardWriter
from megatron.data.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class PrepareOptions:
    """How a run goes; `encode`: what becomes of a record.

    `on_error`: "stop" at a faulty record or file, or "skip" it, counted and listed. `partition`:
    (i, n), the i-th of n parts, from 1. `checkpoint_seconds`: how much work a kill can cost.
    `quiet`: no progress bar.
    """

    encode: EncodeOptions = EncodeOptions()
    workers: int = 1
    on_error: str = "stop"
    partition: tuple[int, int] = (1, 1)
    checkpoint_seconds: float = 10.0
    quiet: bool = False


def write_shards(
    sources: list[Source],
    prefixes: list[str | os.PathLike],
    tokenizer: Tokenizer,
    options: PrepareOptions = PrepareOptions(),
    *,
    about: dict | None = None,
    label: str = "tokenising",
) -> list[dict]:
    """Encode `sources` into shards, one prefix for each of `options.encode.keys`.

    Returns the manifests, whose `source` holds `about` and each input's size and SHA-256. Raises
    CorpusError at a fault, or if there is no document with text; no .idx is then left.
    """
    return _Run(sources, prefixes, tokenizer, options, about or {}, label).run()


class _Run:
    def __init__(self, sources, prefixes, tokenizer, options, about, label) -> None:
        self.sources, self.tokenizer, self.options = sources, tokenizer, options
        self.prefixes, self.about, self.label = [os.fspath(p) for p in prefixes], about, label
        if len(self.prefixes) != len(options.encode.keys):
            raise ValueError(f"{len(self.prefixes)} prefixes, keys {options.encode.keys}")
        if max(options.partition) > 1 and any(source.kind == "hub" for source in sources):
            raise CorpusError("a hub's data set has no bytes to share: --partition needs files")
        encode = options.encode
        job = {
            "sources": [source.identity() for source in sources],
            "tokenizer": tokenizer.fingerprint(),
            "options": [encode.keys, encode.append_eod, encode.ftfy, encode.pile_sets],
            "partition": options.partition,
            "chunks": [CHUNK_BYTES, MAX_TEXTS],  # their numbers depend on these
        }
        self.journal = Journal(self.prefixes[0], job, options.checkpoint_seconds)
        self.skipped_path = shard_path(self.prefixes[0], ".skipped.txt")
        self.skipped_part = Path(f"{self.skipped_path}.part")
        self.facts: list[dict] = [{} for _ in sources]
        self.counts = dict.fromkeys(COUNTS, 0)
        self.done: list[int] | None = None  # (source, number) of the last chunk written
        self.begin: list[int] | None = None  # of the first, for the check before a merge
        self.ends = [sum(s.size for s in sources[: i + 1]) for i in range(len(sources))]

    def run(self) -> list[dict]:
        encoder = Encoder(self.tokenizer, self.options.encode)
        with Workers(encoder, self.options.workers) as workers, ExitStack() as stack:
            self.writers = [
                stack.enter_context(ShardWriter(prefix, self.tokenizer.dtype))
                for prefix in self.prefixes
            ]
            self._resume()
            self.skipped = stack.enter_context(
                open(self.skipped_part, "a", encoding="utf-8", errors="backslashreplace")
            )
            total = self.ends[-1] // self.options.partition[1] if self.ends else 0
            try:
                with Progress(total, self.label, self.options.quiet) as progress:
                    for result in workers.map(self._chunks()):
                        self._take(result, progress)
                manifests = self._finish()
            except OSError as error:  # a full disk's names no file
                place = "" if error.filename else f"{self.prefixes[0]}: "
                raise CorpusError(f"{place}{error}; {self._kept()}") from error
            except DataError as error:
                raise type(error)(f"{error}{self._kept(', ')}") from error
            finally:
                for writer in self.writers:
                    writer.keep_parts = self.journal.exists
                if not self.journal.exists:
                    self.skipped_part.unlink(missing_ok=True)
        return manifests

    def _resume(self) -> None:
        """Go on from the journal of the same job, if the .part files hold what it says."""
        state = self.journal.read()
        held = state and all(
            writer.shared_name and writer.holds(*written)
            for writer, written in zip(self.writers, state["written"], strict=True)
        )
        self.skipped_part.touch()
        if not held:
            if self.journal.exists and not self.options.quiet:
                why = self.journal.refused or "counts more than the .part files hold"
                print(f"{self.journal.path}: {why}; beginning anew", file=sys.stderr)
            self.journal.remove()
            state = {"written": [(0, 0)] * len(self.writers), "skipped_bytes": 0}
        else:
            self.done, self.begin, self.counts = state["done"], state["begin"], state["counts"]
            self.facts = state["facts"]
            if not self.options.quiet:
                print(f"going on after {self.counts['documents']:,} documents", file=sys.stderr)
        for writer, written in zip(self.writers, state["written"], strict=True):
            writer.rewind(*written)
        os.truncate(self.skipped_part, state["skipped_bytes"])

    def _chunks(self) -> Iterator[Chunk]:
        """The chunks of this partition that are not yet written, numbered."""
        part, parts = self.options.partition
        total = self.ends[-1] if self.ends else 0
        first_source = self.done[0] if self.done else 0
        for number, source in enumerate(self.sources):
            start, end = self.ends[number] - source.size, self.ends[number]
            if number < first_source or (end * parts < total * (part - 1) and parts > 1):
                continue
            for chunk in self._guarded(number, source):
                chunk.source = number
                # In which of the parts the chunk ends; the very end belongs to the last.
                at = min(parts - 1, (start + chunk.position) * parts // max(1, total))
                if parts > 1 and at >= part:
                    return
                before = self.done and [number, chunk.number] <= self.done
                if not before and (parts == 1 or at == part - 1):
                    yield chunk

    def _guarded(self, number: int, source: Source) -> Iterator[Chunk]:
        """The chunks of one source; what breaks its reading becomes its last one."""
        position = count = 0
        try:
            keys = self.options.encode.keys
            for count, chunk in enumerate(read_source(source, keys, self.facts[number]), 1):
                chunk.number, position = count, chunk.position
                yield chunk
            # A folder's text files may be empty, as __init__.py is; an archive has a purpose.
            fault = None if count or source.kind == "text" else f"{source.path}: has no records"
        except Fault as error:
            fault = str(error)
        if fault is not None:
            yield Chunk(source.path, fault=fault, number=count + 1, position=position)

    def _take(self, result: Encoded, progress: Progress) -> None:
        if result.faults and self.options.on_error == "stop":
            raise CorpusError(result.faults[0])
        for fault in result.faults:
            self.skipped.write(fault + "\n")
        for writer, tokens, sizes in zip(self.writers, result.tokens, result.sizes, strict=True):
            writer.add_documents(tokens, sizes)
        for name, count in result.counts.items():
            self.counts[name] += count
        self.done = [result.source, result.number]
        self.begin = self.begin or self.done
        read = self.ends[result.source] - self.sources[result.source].size + result.position
        part, parts = self.options.partition
        progress.show(read - self.ends[-1] * (part - 1) // parts, self.counts)
        if self.journal.due:
            written = [writer.sync() for writer in self.writers]
            self.skipped.flush()
            state = {
                "done": self.done,
                "begin": self.begin,
                "written": written,
                "counts": self.counts,
                "facts": self.facts,
                "skipped_bytes": os.path.getsize(self.skipped_part),
            }
            self.journal.write(state)

    def _finish(self) -> list[dict]:
        part, parts = self.options.partition
        faults = self.counts.pop("faults")
        if not self.counts["documents"]:
            causes = {
                "faulty records skipped": faults,
                "without text": self.counts["empty_documents"],
                "left out by --pile-set": self.counts["left_out_by_set"],
            }
            text = describe_nothing([source.path for source in self.sources], causes)
            if parts == 1:
                raise CorpusError(f"{text}; nothing is written")
            # The share of a small input may be nothing.
            print(f"partition {part}/{parts} of {text}", file=sys.stderr)
        inputs = [
            {"path": source.path, "bytes": source.size, **fact}
            for source, fact in zip(self.sources, self.facts, strict=True)
        ]
        source = {**self.about, "files": inputs, "skipped": faults}
        if parts > 1:
            source["partition"] = {"part": part, "of": parts, "begin": self.begin, "end": self.done}
        manifests = []
        for writer, key in zip(self.writers, self.options.encode.keys, strict=True):
            counts = {**self.counts, "documents": len(writer), "tokens": writer.tokens}
            described = source if key == "text" else {**source, "key": key}
            manifest = build_manifest(
                self.tokenizer, self.options.encode.append_eod, counts, described
            )
            writer.manifest = to_bytes(manifest)
            manifests.append(manifest)
        self.skipped.flush()
        if faults:
            os.replace(self.skipped_part, self.skipped_path)
            print(describe_skipped(self.skipped_path, faults), file=sys.stderr)
        else:
            self.skipped_part.unlink(missing_ok=True)
            self.skipped_path.unlink(missing_ok=True)
        for writer in self.writers:
            writer.keep_parts = self.journal.exists
            writer.finalize()
        self.journal.remove()
        return manifests

    def _kept(self, before: str = "") -> str:
        """What a stopped run says of the work it leaves."""
        if not self.journal.exists:
            return "" if before else "nothing is written"
        documents = json.loads(self.journal.path.read_text())["state"]["counts"]["documents"]
        return f"{before}the same command goes on after the first {documents:,} documents"
