"""Tables to chunks: parquet files (pyarrow), and data sets of a hub or a folder (`datasets`).

Both libraries are imported where they are used; `datasets` is optional.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from megatron.data.errors import CorpusError
from megatron.data.prepare.chunks import CHUNK_BYTES, MAX_TEXTS, Chunk, Fault, damaged, positioned
from megatron.data.prepare.compression import DAMAGE, hash_file
from megatron.data.prepare.sources import HUB, Source

_BATCH = 64  # rows of a parquet file at a time
_BUFFER = 1 << 20


def read_parquet(source: Source, keys: tuple[str, ...], facts: dict) -> Iterator[Chunk]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CorpusError(f"{source.path}: reading parquet needs `pip install pyarrow`") from None
    done = 0
    try:
        # Reading ahead, by pre_buffer or threads, would hold more the longer the file is.
        options = {"pre_buffer": False, "buffer_size": _BUFFER}
        with pyarrow.parquet.ParquetFile(source.path, **options) as file:
            names, total = file.schema_arrow.names, max(1, file.metadata.num_rows)
            if missing := [key for key in keys if key not in names]:
                raise Fault(
                    f"{source.path}:1", f"has no column {missing[0]!r} (its columns: {names})"
                )
            columns = [*keys, *(name for name in ("meta",) if name in names)]

            def rows() -> Iterator[dict]:
                nonlocal done
                for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
                    for row in batch.to_pylist():
                        done += 1
                        yield row

            chunks = record_chunks(rows(), source.path)
            yield from positioned(chunks, lambda: source.size * done // total)
    except (pyarrow.ArrowException, *DAMAGE) as error:
        raise Fault(f"{source.path}:{done + 1}", damaged(error)) from error
    facts["sha256"] = hash_file(source.path)


def read_hub(source: Source, keys: tuple[str, ...], facts: dict) -> Iterator[Chunk]:
    try:
        import datasets
    except ImportError:
        raise CorpusError(f"{source.path}: a hub's data set needs `pip install datasets`") from None
    try:
        if source.path.startswith(HUB):
            name, _, split = source.path[len(HUB) :].partition(":")
            rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        else:
            rows = datasets.load_from_disk(source.path)
            facts["fingerprint"] = getattr(rows, "_fingerprint", None)
    except Exception as error:  # the library and those below it raise whatever they like
        raise Fault(source.path, f"cannot be opened: {error}") from error
    if isinstance(rows, dict):
        raise Fault(source.path, f"holds several splits; give one of {sorted(rows)}'s folder")
    done = 0

    def records() -> Iterator[dict]:
        nonlocal done
        for row in rows:
            done += 1
            yield row

    try:
        yield from record_chunks(records(), source.path)
    except Exception as error:
        raise Fault(f"{source.path}:{done + 1}", f"cannot be read on: {error}") from error
    facts["rows"] = done


def record_chunks(rows: Iterable[dict], where: str) -> Iterator[Chunk]:
    """Rows of a table as JSON lines, about CHUNK_BYTES together: one way through the workers for
    all records."""
    lines, size, first = [], 0, 1
    try:
        for row in rows:
            line = json.dumps(row, default=str, ensure_ascii=False) + "\n"
            lines.append(line.encode("utf-8", "surrogatepass"))
            size += len(lines[-1])
            if size >= CHUNK_BYTES or len(lines) >= MAX_TEXTS:
                yield Chunk(where, first, b"".join(lines))
                lines, size, first = [], 0, first + len(lines)
    except Exception:  # what was read before the table broke counts
        if lines:
            yield Chunk(where, first, b"".join(lines))
        raise
    if lines:
        yield Chunk(where, first, b"".join(lines))
