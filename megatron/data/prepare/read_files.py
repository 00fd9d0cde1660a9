"""Read each kind of source (see `sources.py`) as a stream of chunks.

A reader never loads a complete archive into memory. Error messages name a place as `file:record`,
or as `file!member:record` inside an archive. Records are numbered from 1. If a source is damaged or
truncated, the reader yields the chunks before the damage and then raises `Fault`.
"""

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from megatron.data.prepare import chunks
from megatron.data.prepare.chunks import Chunk, Fault, Limits, Place, foreign_bytes
from megatron.data.prepare.compression import CountedFile, decompressed, hash_file, read_out
from megatron.data.prepare.read_tables import read_hub, read_parquet
from megatron.data.prepare.sources import Source, kind_of

Member = tuple[str, Callable[[], Any]]
"""A pair (the place of an archive member, the function that opens the member)."""


def read_source(
    source: Source, keys: tuple[str, ...], facts: dict, limits: Limits
) -> Iterator[Chunk]:
    """Yield the chunks of one source.

    Args:
        source: The source to read.
        keys: The keys under which a record contains the texts to encode.
        facts: A dict to which the SHA-256 of the input is added when all chunks have been read.
        limits: The limits that the input must not exceed.

    Raises:
        Fault: The source is damaged or truncated, or exceeds the limits.
        CorpusError: The library for this kind of source is not installed.
    """
    # The chunks may leave out other keys.
    place = Place(source.path, limits, source.size)
    with foreign_bytes(place):
        yield from _READERS[source.kind](source, keys, facts, place)


class _TarEntry(tarfile.TarInfo):
    """A header in a tar archive. Reading it raises an error if the archive is damaged."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            ended = isinstance(error, tarfile.EOFHeaderError)  # pyright: ignore[reportAttributeAccessIssue]  no stub
            if ended or tar.offset == 0:  # at the first header, `tarfile` raises an error
                raise
            # `tarfile` itself would stop silently, as at the end of the archive.
            raise EOFError(f"the archive ends without its end mark: {error}") from None


def _sequential(read: Callable[[io.BufferedReader, Place], Iterator[Chunk]]) -> Callable:
    """Turn a function that reads an open stream into a function that reads a `Source`."""
    # The new function opens, decompresses and hashes the file of the source.

    def reader(source: Source, keys: tuple[str, ...], facts: dict, place: Place) -> Iterator[Chunk]:
        with CountedFile(source.path) as raw:
            stream = decompressed(source.path, raw, place.expand)
            yield from chunks.positioned(read(stream, place), raw.tell)
            facts["sha256"] = raw.digest()

    return reader


def _read_tar(stream: io.BufferedReader, place: Place) -> Iterator[Chunk]:
    path = place.name
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_TarEntry) as archive:

        def members() -> Iterator[Member]:
            for entry in archive:
                # Drop the headers that `tarfile` collects, so that memory is bounded.
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]  not in the stub
                if entry.isfile() and "/._" not in f"/{entry.name}":  # what macOS adds
                    place.name = f"{path}!{entry.name}"
                    if entry.size < 0:
                        raise EOFError(f"the member's size is {entry.size}")
                    yield place.name, partial(archive.extractfile, entry)

        yield from _member_chunks(members(), path, place)
    read_out(stream)  # the checksum of a gzip file follows the last member


def _member_chunks(members: Iterator[Member], path: str, place: Place) -> Iterator[Chunk]:
    """Yield the chunks of an archive, given its members (the files in the archive)."""
    # A member whose name ends in .jsonl, .json or .ndjson contains one record per line. Any other
    # member is one document.
    for is_records, group in groupby(members, lambda member: kind_of(member[0]) == "jsonl"):
        if is_records:
            for name, open_member in group:
                with open_member() as member:
                    stream = decompressed(name, member, place.expand)
                    yield from chunks.line_chunks(stream, place)
                    read_out(stream)
        else:
            yield from chunks.text_chunks(_documents(group, place), path)


def _documents(members: Iterable[Member], place: Place) -> Iterator[tuple[str, bytes]]:
    for name, open_member in members:
        with open_member() as file:
            yield name, place.read(decompressed(name, file, place.expand))


def _read_dat(stream: io.BufferedReader, place: Place) -> Iterator[Chunk]:
    """Yield the chunks of an archive in the DatArchive format of lm_dataformat."""
    # In this format, each document is preceded by its length in bytes, as 16 decimal digits.
    path = place.name

    def documents() -> Iterator[tuple[str, bytes]]:
        number = 0
        while head := stream.read(16):
            number += 1
            place.name = f"{path}:{number}"
            if len(head) < 16 or not head.isdigit():
                raise EOFError(f"{head!r} is not the length of a document")
            place.check_size(int(head))
            content = stream.read(int(head))
            if len(content) < int(head):
                raise EOFError(f"the document has {len(content)} of {int(head)} bytes")
            yield place.name, content

    return chunks.text_chunks(documents(), path)


def _read_text(source: Source, keys: tuple[str, ...], facts: dict, place: Place) -> Iterator[Chunk]:
    done, digests, paths = 0, [], iter(source.paths)

    def documents() -> Iterator[tuple[str, bytes]]:
        nonlocal done
        for path in paths:
            place.name, place.expanded = path, 0
            with foreign_bytes(place), CountedFile(path) as raw:
                place.size = os.path.getsize(path)
                done += place.size
                content = place.read(decompressed(path, raw, place.expand))
                digests.append(raw.digest())
            yield path, content

    while len(digests) < len(source.paths):
        try:
            found = chunks.text_chunks(documents(), source.path)
            yield from chunks.positioned(found, lambda: done)
        except Fault as error:  # of one file; the other files are read all the same
            digests.append("")
            yield Chunk(source.path, fault=str(error), position=done)
    if len(source.paths) == 1:
        facts["sha256"] = digests[0] or None
    else:
        facts["files"] = len(source.paths)
        facts["sha256_of_sha256s"] = hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _read_zip(source: Source, keys: tuple[str, ...], facts: dict, place: Place) -> Iterator[Chunk]:
    with open(source.path, "rb") as file, zipfile.ZipFile(file) as archive:

        def members() -> Iterator[Member]:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
                if not entry.is_dir() and "/._" not in f"/{entry.filename}":
                    place.name = f"{source.path}!{entry.filename}"
                    yield place.name, partial(archive.open, entry)

        yield from chunks.positioned(_member_chunks(members(), source.path, place), file.tell)
    facts["sha256"] = hash_file(source.path)


_READERS: dict[str, Callable[..., Iterator[Chunk]]] = {
    "jsonl": _sequential(chunks.line_chunks),
    "tar": _sequential(_read_tar),
    "dat": _sequential(_read_dat),
    "text": _read_text,
    "zip": _read_zip,
    "parquet": read_parquet,
    "hub": read_hub,
}
