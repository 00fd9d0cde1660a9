"""Divide inputs into chunks, the pieces of about 1 MB of text that worker processes encode.

How a reader divides an input depends only on the content. Chunk k of a file therefore contains the
same text in every run. As a result, the output does not depend on the number of workers, and an
interrupted run can continue after the last chunk that it wrote.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TypeVar

from megatron.data.errors import CorpusError, DataError
from megatron.data.prepare.compression import read_block

CHUNK_BYTES = 1 << 20
MAX_TEXTS = 4096
ALWAYS_ALLOWED = 64 << 20  # bytes; a small file may hold much repetition
_PIECE = 1 << 20

T = TypeVar("T")


class Fault(Exception):
    """An error in an input, after which the rest of the input cannot be read.

    Args:
        where: The file and record, or the member of an archive, that could not be read.
        message: The reason.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")


@dataclass(frozen=True)
class Limits:
    """Limits that keep a hostile or damaged input from filling the memory or the disk.

    Attributes:
        document_bytes: The largest size of one document or record, in bytes of text.
        expansion: The largest ratio of the decompressed size of an input to its compressed size.
            An input that expands to at most 64 MiB is always accepted.
    """

    document_bytes: int = 1 << 30
    expansion: float = 200.0


@dataclass
class Place:
    """The position of a reader in its input, and the number of bytes decompressed so far.

    Attributes:
        name: A text of the form `file`, `file:record`, `file!member` or `file!member:record`. A
            member is a file inside an archive. Records are numbered from 1.
        limits: The limits that the input must not exceed.
        size: The number of bytes of the input, or 0 if it is unknown. An input of unknown size may
            expand without limit.
        expanded: The number of bytes decompressed so far. A compressed file inside a compressed
            archive counts twice.
        records: If the input is a table, the number of rows read so far. Otherwise 0.
    """

    name: str
    limits: Limits = Limits()
    size: int = 0
    expanded: int = 0
    records: int = 0

    def expand(self, count: int) -> None:
        """Add `count` to the number of decompressed bytes.

        Raises:
            Fault: The new number of decompressed bytes exceeds the limit of the input.
        """
        self.expanded += count
        most = self.limits.expansion
        if self.size and self.expanded > max(ALWAYS_ALLOWED, most * self.size):
            raise Fault(
                self.name,
                f"expands to more than {most:g} times the {self.size:,} bytes of the input; if the "
                "input is no decompression bomb, give a larger --max-expansion",
            )

    def check_size(self, size: int) -> None:
        """Check that a document or record of `size` bytes is not too large.

        Raises:
            Fault: `size` is larger than `limits.document_bytes`.
        """
        if size > self.limits.document_bytes:
            raise Fault(
                self.name,
                f"one text has more than {self.limits.document_bytes:,} bytes; split it, or give a "
                "larger --max-document-bytes",
            )

    def read(self, stream: IO[bytes]) -> bytes:
        """Return the document that the rest of `stream` contains.

        Raises:
            Fault: The document is larger than `limits.document_bytes`, or is a tar archive.
        """
        pieces, size = [], 0
        while piece := stream.read(_PIECE):
            size += len(piece)
            self.check_size(size)
            pieces.append(piece)
        content = b"".join(pieces)
        if content[257:262] == b"ustar":
            raise Fault(self.name, "is a tar archive; name it .tar, .tar.xz, ..., or unpack it")
        return content


@dataclass
class Chunk:
    """A piece of an input. It contains either JSON lines, or documents, or a fault.

    Attributes:
        where: The path of the input, or of the member of an archive.
        first: The number of the chunk's first line. The lines of the input are numbered from 1.
        lines: Complete lines, one JSON record each.
        texts: A pair (place, content) for each document. Error messages contain the place.
        fault: The reason why the input could not be read further, or None.
        position: The number of bytes of the input that were read when the chunk was complete.
        source: The index of the input in the list of inputs.
        number: The number of the chunk in its input, from 1.
    """

    where: str
    first: int = 1
    lines: bytes | None = None
    texts: list[tuple[str, bytes]] | None = None
    fault: str | None = None
    position: int = 0
    source: int = 0
    number: int = 0


def line_chunks(stream: io.BufferedReader, place: Place) -> Iterator[Chunk]:
    """Yield chunks of complete lines from `stream`. The last line may lack its line feed.

    Args:
        place: The place of the stream. If the stream is damaged, the number of the line is
            appended to `place.name`, for example "x.jsonl:7".

    Raises:
        Fault: A line is longer than `place.limits.document_bytes`.
        Exception: The stream is damaged. The lines before the damage are yielded first.
    """
    held: list[bytes] = []
    held_bytes, first, error, where = 0, 1, None, place.name
    while error is None:
        block, error = read_block(stream, CHUNK_BYTES)
        if not block:
            break
        end = block.rfind(b"\n") + 1
        if end == 0:
            held.append(block)
            held_bytes += len(block)
            place.name = f"{where}:{first}"
            place.check_size(held_bytes)
            continue
        lines = b"".join([*held, block[:end]])
        yield Chunk(where, first, lines)
        first += lines.count(b"\n")
        held, held_bytes = [block[end:]], len(block) - end
    if error is not None:
        place.name = f"{where}:{first}"
        raise error
    if any(held):
        yield Chunk(where, first, b"".join(held))


def text_chunks(texts: Iterable[tuple[str, bytes]], where: str) -> Iterator[Chunk]:
    """Group complete documents into chunks, and yield the chunks.

    Args:
        texts: The place and content of each document.
        where: The path of the input.
    """
    for batch in batches(texts, lambda text: len(text[1])):
        yield Chunk(where, texts=batch)


def batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists of about `CHUNK_BYTES` bytes and at most `MAX_TEXTS` items.

    If `items` raises an error, yield the items before it as a last list, then raise the error.

    Args:
        size_of: The function that returns the size of an item in bytes.
    """
    batch: list[T] = []
    size = 0
    try:
        for item in items:
            batch.append(item)
            size += size_of(item)
            if size >= CHUNK_BYTES or len(batch) >= MAX_TEXTS:
                yield batch
                batch, size = [], 0
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


@contextmanager
def foreign_bytes(place: Place, message: str = "is truncated or damaged") -> Iterator[None]:
    """Replace the error that a library raises for the bytes of an input by a `Fault`.

    The library is called in the `with` block. The text of the `Fault` is `place.name`, then
    `message`, then the text of the library's error.

    Args:
        place: The position of the reader.
        message: What is wrong with the input.

    Raises:
        Fault: The block raised an error that is neither a DataError nor a MemoryError.
        DataError: The block raised this error. It is not replaced.
        CorpusError: The block raised a MemoryError.
    """
    try:
        yield
    except Exception as error:  # the libraries raise more types than they document
        if isinstance(error, (Fault, DataError)):
            raise
        if isinstance(error, MemoryError):  # no `Fault`: the input may be intact
            raise CorpusError(
                f"{place.name}: reading it needs more memory than there is ({error}); free some, "
                "or remove this input if it is damaged"
            ) from error
        why = str(error) or type(error).__name__
        raise Fault(place.name, f"{message}: {why}") from error


def positioned(chunks: Iterable[Chunk], position: Callable[[], int]) -> Iterator[Chunk]:
    """Set the attribute `position` of each chunk to `position()`, and yield the chunk.

    Args:
        position: A function that returns the number of bytes of the input that were read so far.
    """
    for chunk in chunks:
        chunk.position = position()
        yield chunk
