"""Chunks, the pieces of about 1 MB of text that readers send to worker processes.

A reader splits its input by a rule that depends only on the content, so chunk k of a file contains
the same text in every run. Therefore the output does not depend on the number of workers, and an
interrupted run can continue after the last chunk that it wrote.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from megatron.data.prepare.compression import DAMAGE, read_block

CHUNK_BYTES = 1 << 20
MAX_TEXTS = 4096
MAX_RECORD_BYTES = 1 << 30  # a longer line is refused, so that memory is bounded

T = TypeVar("T")


class Fault(Exception):
    """An input cannot be read further.

    Args:
        where: The file and the record, or the archive member, that could not be read.
        message: The reason.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")


@dataclass
class Place:
    """The current position of a reader in its input, for error messages.

    Attributes:
        name: `file`, `file:record`, `file!member` or `file!member:record`. A member is a file
            inside an archive. Records are numbered from 1. The reader updates `name` while it
            reads.
    """

    name: str


@dataclass
class Chunk:
    """A piece of an input. It contains one of three things: JSON lines, documents, or a fault.

    Attributes:
        where: The path of the input, or of the archive member.
        first: The number of the first line in `lines`.
        lines: Complete lines, one JSON record each.
        texts: A pair (place, content) for each document. Error messages name the place.
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


def line_chunks(stream: io.BufferedReader, where: str) -> Iterator[Chunk]:
    """Yield chunks of complete lines from `stream`. The last line may lack its line feed.

    Args:
        where: The place of the stream, for error messages.

    Raises:
        Fault: the stream is damaged, or a line is longer than `MAX_RECORD_BYTES`.
    """
    held: list[bytes] = []
    held_bytes, first, error = 0, 1, None
    while error is None:
        block, error = read_block(stream, CHUNK_BYTES)
        if not block:
            break
        end = block.rfind(b"\n") + 1
        if end == 0:
            held.append(block)
            held_bytes += len(block)
            if held_bytes > MAX_RECORD_BYTES:
                raise Fault(f"{where}:{first}", f"has no line end in {MAX_RECORD_BYTES} bytes")
            continue
        lines = b"".join([*held, block[:end]])
        yield Chunk(where, first, lines)
        first += lines.count(b"\n")
        held, held_bytes = [block[end:]], len(block) - end
    if error is not None:
        with damage_as_fault(Place(f"{where}:{first}")):
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
def damage_as_fault(
    place: Place,
    errors: tuple[type[Exception], ...] = DAMAGE,
    message: str = "is truncated or damaged",
) -> Iterator[None]:
    """Raise a `Fault` if the `with` block raises one of `errors`.

    Args:
        place: The position of the reader, which the text of the fault names.
        errors: The types of errors to replace by a fault. By default, a damaged file raises them.
        message: The start of the reason that the fault gives.

    Raises:
        Fault: the block raised one of `errors`.
    """
    try:
        yield
    except errors as error:
        why = str(error) or type(error).__name__
        raise Fault(place.name, f"{message}: {why}") from error


def positioned(chunks: Iterable[Chunk], position: Callable[[], int]) -> Iterator[Chunk]:
    """Yield the chunks with their `position` set.

    Args:
        position: The function that returns the number of bytes of the input read so far.
    """
    for chunk in chunks:
        chunk.position = position()
        yield chunk
