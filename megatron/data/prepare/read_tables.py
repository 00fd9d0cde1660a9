"""Read tables as chunks: parquet files, and data sets that the `datasets` library can open.

The libraries `pyarrow` and `datasets` are imported only in the functions that use them, and
`datasets` is optional.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from megatron.data.errors import CorpusError, needs_package
from megatron.data.prepare.chunks import Chunk, Fault, Place, batches, damage_as_fault, positioned
from megatron.data.prepare.compression import DAMAGE, hash_file
from megatron.data.prepare.sources import HUB, Source

_BATCH = 64  # number of rows of a parquet file read at a time
_BUFFER = 1 << 20


def read_parquet(source: Source, keys: tuple[str, ...], facts: dict) -> Iterator[Chunk]:
    """Yield the chunks of a parquet file. Each row becomes one JSON record.

    The record contains the columns that are named in `keys`. If the file has a column named `meta`,
    the record contains that column in addition.

    Args:
        source: The source to read, whose path is that of the parquet file.
        keys: The names of the columns that will be encoded.
        facts: A dict to which the SHA-256 of the file is added at the end.

    Raises:
        Fault: the file is damaged, or one of the columns that are named in `keys` is missing.
        CorpusError: `pyarrow` is not installed.
    """
    with needs_package("pyarrow", f"{source.path}: reading parquet", CorpusError):
        import pyarrow
        import pyarrow.parquet
    done, place = 0, Place(f"{source.path}:1")
    # With pre_buffer or threads, pyarrow reads ahead, and memory grows with the file's length.
    options = {"pre_buffer": False, "buffer_size": _BUFFER}
    with (
        damage_as_fault(place, (pyarrow.ArrowException, *DAMAGE)),
        pyarrow.parquet.ParquetFile(source.path, **options) as file,
    ):
        names, total = file.schema_arrow.names, max(1, file.metadata.num_rows)
        if missing := [key for key in keys if key not in names]:
            raise Fault(place.name, f"has no column {missing[0]!r} (its columns: {names})")
        columns = [*keys, *(name for name in ("meta",) if name in names)]

        def rows() -> Iterator[dict]:
            nonlocal done
            for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    done += 1
                    yield row
                place.name = f"{source.path}:{done + 1}"

        chunks = _record_chunks(rows(), source.path)
        yield from positioned(chunks, lambda: source.size * done // total)
    facts["sha256"] = hash_file(source.path)


def read_hub(source: Source, keys: tuple[str, ...], facts: dict) -> Iterator[Chunk]:
    """Yield the chunks of a data set that the `datasets` library opens.

    Each row becomes one JSON record.

    Args:
        source: The source to read. Its path is `hub:ID[:SPLIT]` for a data set of the Hugging Face
            hub, or otherwise the path of a folder that `datasets` wrote.
        facts: A dict to which the number of rows is added at the end.

    Raises:
        Fault: the data set cannot be opened or read, or the folder contains several splits.
        CorpusError: `datasets` is not installed.
    """
    with needs_package("datasets", f"{source.path}: a hub's data set", CorpusError):
        import datasets
    place, any_error = Place(source.path), (Exception,)  # `datasets` does not document its errors
    with damage_as_fault(place, any_error, "cannot be opened"):
        if source.path.startswith(HUB):
            name, _, split = source.path[len(HUB) :].partition(":")
            rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        else:
            rows = datasets.load_from_disk(source.path)
            facts["fingerprint"] = getattr(rows, "_fingerprint", None)
    if isinstance(rows, dict):
        raise Fault(source.path, f"holds several splits; give one of {sorted(rows)}'s folder")
    done = 0

    def records() -> Iterator[Mapping]:
        nonlocal done
        for row in cast(Iterable[Mapping], rows):
            done += 1
            place.name = f"{source.path}:{done + 1}"
            yield row

    place.name = f"{source.path}:1"
    with damage_as_fault(place, any_error, "cannot be read further"):
        yield from _record_chunks(records(), source.path)
    facts["rows"] = done


def _record_chunks(rows: Iterable[Mapping], where: str) -> Iterator[Chunk]:
    """Yield chunks in which each row of a table is one JSON line.

    Worker processes encode these chunks like those of a .jsonl file.
    """
    lines = (json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)
    first = 1
    for batch in batches((line.encode("utf-8", "surrogatepass") for line in lines), len):
        yield Chunk(where, first, b"".join(batch))
        first += len(batch)
