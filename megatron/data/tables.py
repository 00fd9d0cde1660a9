"""Tables to chunks: parquet files (pyarrow), and data sets of a hub or a folder (`datasets`).

Both libraries are imported where they are used; `datasets` is optional.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from .chunks import TABLE_ROWS, Chunk, Fault, damaged
from .errors import CorpusError
from .sources import HUB, Source
from .streams import DAMAGE, hash_file


def read_parquet(source: Source, keys: tuple[str, ...], facts: dict) -> Iterator[Chunk]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CorpusError(f"{source.path}: reading parquet needs `pip install pyarrow`") from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            names = file.schema_arrow.names
            if missing := [key for key in keys if key not in names]:
                raise Fault(
                    f"{source.path}:1", f"has no column {missing[0]!r} (its columns: {names})"
                )
            columns = [*keys, *(name for name in ("meta",) if name in names)]
            for batch in file.iter_batches(batch_size=TABLE_ROWS, columns=columns):
                for chunk in rows_chunk(batch.to_pylist(), source.path, row + 1):
                    row += chunk.lines.count(b"\n")
                    chunk.position = source.size * row // max(1, file.metadata.num_rows)
                    yield chunk
    except (pyarrow.ArrowException, *DAMAGE) as error:
        raise Fault(f"{source.path}:{row + 1}", damaged(error)) from error
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
    records, row, more = iter(rows), 0, True
    while more:
        try:
            batch = list(itertools.islice(records, TABLE_ROWS))
        except Exception as error:
            raise Fault(f"{source.path}:{row + 1}", f"cannot be read on: {error}") from error
        yield from rows_chunk(batch, source.path, row + 1)
        row += len(batch)
        more = len(batch) == TABLE_ROWS
    facts["rows"] = row


def rows_chunk(rows: list[dict], where: str, first: int) -> Iterator[Chunk]:
    """Rows of a table as JSON lines: one way through the workers for all records."""
    if rows:
        lines = (json.dumps(row, default=str, ensure_ascii=False) for row in rows)
        text = "".join(line + "\n" for line in lines)
        yield Chunk(where, first, text.encode("utf-8", "surrogatepass"))
