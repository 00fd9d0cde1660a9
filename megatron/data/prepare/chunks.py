"""Chunks: the pieces of about 1 MB in which text passes from the readers to the workers.

A reader splits its input by a rule that depends on the content alone, so that chunk k of a file is
the same bytes in every run. Therefore the output cannot depend on the number of workers, and a
killed run can go on after the last chunk that it wrote.
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
MAX_RECORD_BYTES = 1 << 30  # a longer line is not a record; memory must have a bound

T = TypeVar("T")


class Fault(Exception):
    """An input that cannot be read further: `where` (file and record), and why."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")


@dataclass
class Place:
    """Where a reader is in its input: `file`, `file:record`, `file!member` or `file!member:record`.

    Records count from 1. The reader updates `name` while it reads.
    """

    name: str


@dataclass
class Chunk:
    """Either complete `lines` (JSON records) or `texts`: (place, content) of each document.

    `source`, `number`: index of the input, and of the chunk in it (from 1); they order all chunks.
    `position`: bytes (or rows) of the input that had been read when the chunk was complete.
    `fault`: why reading of the input ended here; such a chunk has no text.
    """

    where: str
    first: int = 1  # line number of the first line
    lines: bytes | None = None
    texts: list[tuple[str, bytes]] | None = None
    fault: str | None = None
    position: int = 0
    source: int = 0
    number: int = 0


def line_chunks(stream: io.BufferedReader, where: str) -> Iterator[Chunk]:
    """Chunks of complete lines of `stream`; the last line may lack its line feed."""
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
    """Chunks of (place, content) pairs."""
    for batch in batches(texts, lambda text: len(text[1])):
        yield Chunk(where, texts=batch)


def batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of about CHUNK_BYTES, at most MAX_TEXTS items.

    If reading `items` raises an error, the items before it come first, then the error.
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
    """Turn `errors` of the block into a Fault at the `place` that the reader has reached."""
    try:
        yield
    except errors as error:
        why = str(error) or type(error).__name__
        raise Fault(place.name, f"{message}: {why}") from error


def positioned(chunks: Iterable[Chunk], position: Callable[[], int]) -> Iterator[Chunk]:
    """Fill in the position of each chunk."""
    for chunk in chunks:
        chunk.position = position()
        yield chunk
