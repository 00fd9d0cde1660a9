"""Chunks: the pieces of about 1 MB in which text passes from the readers to the workers.

A reader cuts its input into chunks by a rule that depends on the content alone, so that chunk k
of a file is the same bytes in every run: output cannot depend on the number of workers, and a
killed run can go on after the last chunk that it wrote.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron.data.prepare.compression import read_block

CHUNK_BYTES = 1 << 20
MAX_TEXTS = 4096
MAX_RECORD_BYTES = 1 << 30  # a longer line is no record; memory must have a bound


class Fault(Exception):
    """An input that cannot be read on: `where` (file and record) and what is wrong."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")


@dataclass
class Chunk:
    """Either whole `lines` (JSON records) or `texts`, documents with the place each stands at.

    `source`, `number`: the input and the place among its chunks; together the order of all chunks.
    `position`: bytes (or rows) of the input that had been read when the chunk was complete.
    `fault`: why the input ends here; such a chunk has no text.
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
    """Whole lines of `stream`; the last need not end in a line feed."""
    held: list[bytes] = []
    held_bytes, first, error = 0, 1, None
    while error is None:
        block, error = read_block(stream, CHUNK_BYTES)
        if not block:
            break
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            held.append(block)
            held_bytes += len(block)
            if held_bytes > MAX_RECORD_BYTES:
                raise Fault(f"{where}:{first}", f"has no line end in {MAX_RECORD_BYTES} bytes")
            continue
        lines = b"".join([*held, block[:cut]])
        yield Chunk(where, first, lines)
        first += lines.count(b"\n")
        held, held_bytes = [block[cut:]], len(block) - cut
    if error is not None:
        raise Fault(f"{where}:{first}", damaged(error)) from error
    if any(held):
        yield Chunk(where, first, b"".join(held))


def text_chunks(texts: Iterable[tuple[str, bytes]], where: str) -> Iterator[Chunk]:
    """(place, content) pairs grouped to about CHUNK_BYTES."""
    batch: list[tuple[str, bytes]] = []
    size = 0
    try:
        for pair in texts:
            batch.append(pair)
            size += len(pair[1])
            if size >= CHUNK_BYTES or len(batch) >= MAX_TEXTS:
                yield Chunk(where, texts=batch)
                batch, size = [], 0
    except Exception:  # what was read before the input broke counts
        if batch:
            yield Chunk(where, texts=batch)
        raise
    if batch:
        yield Chunk(where, texts=batch)


def damaged(error: Exception) -> str:
    return f"is truncated or damaged: {str(error) or type(error).__name__}"


def positioned(chunks: Iterable[Chunk], position: Callable[[], int]) -> Iterator[Chunk]:
    """`chunks` with their position filled in."""
    for chunk in chunks:
        chunk.position = position()
        yield chunk
