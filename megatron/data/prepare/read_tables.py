"""Read tables as chunks: parquet files, and data sets that the `datasets` library can open.

The libraries `pyarrow` and `datasets` are imported only in the functions that use them, and
`datasets` is optional.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from megatron.data.errors import CorpusError, needs_package
from megatron.data.prepare.chunks import Chunk, Fault, Place, batches, foreign_bytes, positioned
from megatron.data.prepare.compression import hash_file
from megatron.data.prepare.sources import HUB, Source

_BATCH = 64  # number of rows of a parquet file read at a time
_BUFFER = 1 << 20


def read_parquet(
    source: Source, keys: tuple[str, ...], facts: dict, place: Place
) -> Iterator[Chunk]:
    """Yield the chunks of a parquet file. Each row becomes one JSON record.

    The record contains the columns `keys`, and the column `meta` if the file has one.

    Args:
        source: The source to read, a parquet file.
        keys: The names of the columns that will be encoded.
        facts: A dict to which the SHA-256 of the file is added at the end.
        place: The position in the file, with the limits that the file must not exceed.

    Raises:
        Fault: The file is damaged or exceeds the limits, or a column in `keys` is missing or is not
            a text column.
        CorpusError: `pyarrow` is not installed.
    """
    with needs_package("pyarrow", f"{source.path}: reading parquet", CorpusError):
        import pyarrow
        import pyarrow.parquet
    place.name = f"{source.path}:1"
    # With pre_buffer or threads, pyarrow reads ahead, and memory grows with the file's length.
    options = {"pre_buffer": False, "buffer_size": _BUFFER}
    with pyarrow.parquet.ParquetFile(source.path, **options) as file:
        names, total = file.schema_arrow.names, max(1, file.metadata.num_rows)
        groups = range(file.metadata.num_row_groups)
        place.expand(sum(file.metadata.row_group(i).total_byte_size for i in groups))
        for key in keys:
            if names.count(key) != 1:
                wrong = f"has {names.count(key) or 'no'} columns {key!r} (its columns: {names})"
                raise Fault(place.name, wrong)
            if not _holds_text(kind := file.schema_arrow.field(key).type):
                raise Fault(place.name, f"column {key!r} is of type {kind}, not a string")
        columns = [*keys, *(name for name in ("meta",) if name in names)]
        parts = file.iter_batches(_BATCH, columns=columns, use_threads=False)
        rows = (row for part in parts for row in part.to_pylist())
        chunks = record_chunks(rows, source.path, place)
        yield from positioned(chunks, lambda: source.size * place.records // total)
    facts["sha256"] = hash_file(source.path)


def _holds_text(kind: Any) -> bool:
    """Return whether a column of this type contains strings, bytes, or lists of these."""
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    names = "string large_string string_view binary large_binary binary_view"
    return any(getattr(types, f"is_{name}")(kind) for name in names.split())


def read_hub(source: Source, keys: tuple[str, ...], facts: dict, place: Place) -> Iterator[Chunk]:
    """Yield the chunks of a data set that the `datasets` library opens.

    Each row becomes one JSON record. Columns other than `keys` and `meta` are null in it.

    Args:
        source: The source to read. For a data set of the Hugging Face hub, the path is
            `hub:ID[:SPLIT[:CONFIG]]`. Otherwise it is the path of a folder that `datasets` wrote.
        facts: A dict to which the number of rows is added at the end.
        place: The position in the data set, with the limits that the data set must not exceed.

    Raises:
        Fault: The data set cannot be opened or read, or the folder contains several splits.
        CorpusError: `datasets` is not installed.
    """
    with needs_package("datasets", f"{source.path}: a hub's data set", CorpusError):
        import datasets
    with foreign_bytes(place, "cannot be opened"):
        if source.path.startswith(HUB):
            name, split, conf = (*source.path[len(HUB) :].split(":"), "", "")[:3]
            rows = datasets.load_dataset(name, conf or None, split=split or "train", streaming=True)
        else:
            rows = datasets.load_from_disk(source.path)
            facts["fingerprint"] = getattr(rows, "_fingerprint", None)
    if isinstance(rows, dict):
        raise Fault(source.path, f"holds several splits; give one of {sorted(rows)}'s folder")
    place.name = f"{source.path}:1"
    kept = (
        {name: value if name in (*keys, "meta") else None for name, value in row.items()}
        for row in cast(Iterable[Mapping], rows)
    )
    with foreign_bytes(place, "cannot be read further"):
        yield from record_chunks(kept, source.path, place)
    facts["rows"] = place.records


def record_chunks(rows: Iterable[Mapping], where: str, place: Place) -> Iterator[Chunk]:
    """Yield chunks in which each row of a table is one JSON line.

    Args:
        rows: The rows of the table.
        where: The path of the input.
        place: The position in the table. `place` is updated while the rows are read.
    """

    def lines() -> Iterator[bytes]:
        place.name = f"{where}:1"
        for row in rows:
            place.records += 1
            line = json.dumps(row, default=_json_value, ensure_ascii=False) + "\n"
            encoded = line.encode("utf-8", "surrogatepass")  # later, such a record is reported
            place.check_size(len(encoded))
            place.expand(len(encoded))
            yield encoded
            place.name = f"{where}:{place.records + 1}"

    first = 1
    for batch in batches(lines(), len):
        yield Chunk(where, first, b"".join(batch))
        first += len(batch)


def _json_value(value: Any) -> Any:
    """Convert `value`, which cannot be written as JSON, to a value that can.

    Bytes become text. Any other value becomes the dict {name of its type: its text}.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return {type(value).__name__: str(value)}
