"""Each kind of source (`sources.py`) to chunks, streaming: never a whole archive in memory.

A place in a message is `file:record`, `file!member:record` inside an archive, counted from 1.
A truncated or damaged file raises Fault where reading stops, after the chunks before it.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator

from megatron.data.prepare.chunks import (
    CHUNK_BYTES,
    MAX_TEXTS,
    Chunk,
    Fault,
    damaged,
    line_chunks,
    positioned,
    text_chunks,
)
from megatron.data.prepare.compression import DAMAGE, CountedFile, decompressed, hash_file, read_out
from megatron.data.prepare.read_tables import read_hub, read_parquet
from megatron.data.prepare.sources import Source, kind_of

Read = Iterator[Chunk]


def read_source(source: Source, keys: tuple[str, ...], facts: dict) -> Read:
    """The chunks of one source. `facts` gets the SHA-256 of what was read through to the end."""
    return _READERS[source.kind](source, keys, facts)


class _Tar(tarfile.TarFile):
    """Knows whether it has `ended`; tarfile itself takes a cut-off archive for a whole one."""

    ended = False


class _TarEntry(tarfile.TarInfo):
    """Notes the mark that ends an archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:
            tar.ended = True
            raise


def _sequential(read: Callable) -> Callable:
    """A reader of one stream: opens, decompresses, hashes it, and turns damage into a Fault."""

    def reader(source: Source, keys: tuple[str, ...], facts: dict) -> Read:
        raw = CountedFile(source.path)
        place = [source.path]  # the reader says here how far it is
        try:
            stream = decompressed(source.path, raw)
            yield from positioned(read(stream, place), lambda: raw.position)
            facts["sha256"] = raw.digest()
        except DAMAGE as error:
            raise Fault(place[0], damaged(error)) from error
        finally:
            raw.close()

    return reader


def _read_jsonl(stream: io.BufferedReader, place: list[str]) -> Read:
    return line_chunks(stream, place[0])


def _read_tar(stream: io.BufferedReader, place: list[str]) -> Read:
    path = place[0]
    with _Tar.open(fileobj=stream, mode="r|", tarinfo=_TarEntry) as archive:

        def members() -> Iterator[tuple[str, Callable[[], io.BufferedIOBase]]]:
            for entry in archive:
                archive.members = []  # else it keeps every header: memory without bound
                if entry.isfile():
                    place[0] = f"{path}!{entry.name}"
                    yield place[0], lambda entry=entry: archive.extractfile(entry)

        yield from _members(members(), path, place)
        if not archive.ended:
            raise EOFError("the archive ends without its end mark")
    read_out(stream)  # a gzip checksum stands behind the last member


def _members(
    members: Iterator[tuple[str, Callable[[], io.BufferedIOBase]]], path: str, place: list[str]
) -> Read:
    """Chunks of an archive's members: records of .jsonl ones, the others are documents."""
    batch: list[tuple[str, bytes]] = []
    size = 0

    def flushed() -> Read:
        nonlocal batch, size
        if batch:
            yield Chunk(path, texts=batch)
        batch, size = [], 0

    try:
        for name, open_member in members:
            with open_member() as member:
                if kind_of(name) == "jsonl":
                    yield from flushed()
                    inner = decompressed(name, member)
                    yield from line_chunks(inner, name)
                    read_out(inner)
                else:
                    batch.append((name, member.read()))
                    size += len(batch[-1][1])
            if size >= CHUNK_BYTES or len(batch) >= MAX_TEXTS:
                yield from flushed()
    except Exception:  # what was read before the archive broke counts
        yield from flushed()
        raise
    yield from flushed()


def _read_dat(stream: io.BufferedReader, place: list[str]) -> Read:
    """lm_dataformat's DatArchive: 16 decimal digits, the length in bytes, then the document."""
    path = place[0]

    def documents() -> Iterator[tuple[str, bytes]]:
        number = 0
        while head := stream.read(16):
            number += 1
            place[0] = f"{path}:{number}"
            if len(head) < 16 or not head.isdigit():
                raise EOFError(f"{head!r} is not the length of a document")
            content = stream.read(int(head))
            if len(content) < int(head):
                raise EOFError(f"the document has {len(content)} of {int(head)} bytes")
            yield place[0], content

    return text_chunks(documents(), path)


def _read_text(source: Source, keys: tuple[str, ...], facts: dict) -> Read:
    done, digests = 0, []

    def documents() -> Iterator[tuple[str, bytes]]:
        nonlocal done
        for path in source.paths:
            raw = CountedFile(path)
            try:
                stream = decompressed(path, raw)
                yield path, stream.read()
                digests.append(raw.digest())
            except DAMAGE as error:
                raise Fault(path, damaged(error)) from error
            finally:
                raw.close()
            done += os.path.getsize(path)

    yield from positioned(text_chunks(documents(), source.path), lambda: done)
    if len(source.paths) == 1:
        facts["sha256"] = digests[0]
    else:
        facts["files"] = len(source.paths)
        facts["sha256_of_sha256s"] = hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _read_zip(source: Source, keys: tuple[str, ...], facts: dict) -> Read:
    place = [source.path]
    with open(source.path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:

                def members() -> Iterator[tuple[str, Callable[[], io.BufferedIOBase]]]:
                    for entry in archive.infolist():
                        if not entry.is_dir():
                            place[0] = f"{source.path}!{entry.filename}"
                            yield place[0], lambda entry=entry: archive.open(entry)

                yield from positioned(_members(members(), source.path, place), file.tell)
        except (*DAMAGE, NotImplementedError, RuntimeError) as error:
            raise Fault(place[0], damaged(error)) from error
    facts["sha256"] = hash_file(source.path)


_READERS: dict[str, Callable[..., Read]] = {
    "jsonl": _sequential(_read_jsonl),
    "tar": _sequential(_read_tar),
    "dat": _sequential(_read_dat),
    "text": _read_text,
    "zip": _read_zip,
    "parquet": read_parquet,
    "hub": read_hub,
}
