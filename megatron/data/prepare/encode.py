"""Encode a chunk of text as tokens. Worker processes run this code.

If a record is faulty, the reason and the place of the record (`file:record`) are stored in the
result. The other records of the chunk are still encoded. `text_to_shards.py` decides whether a
fault ends the run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.data.errors import CorpusError, DataError, needs_package
from megatron.data.prepare.chunks import Chunk
from megatron.data.prepare.progress import printable
from megatron.data.shards.manifest import COUNTS
from megatron.data.tokenizers.base import Tokenizer, utf8
from megatron.files import parse_json

_ONE_A_LINE = "write one JSON object a line, e.g. with jq -c '.[]'"
_JOINER = "\n\n"  # between paragraphs if a text is a list of paragraphs, as in lm_dataformat


@dataclass(frozen=True)
class EncodeOptions:
    """Options for encoding a record.

    Attributes:
        keys: The keys under which a JSON record contains the texts to encode. There is one token
            shard for each key.
        append_eod: Whether each document ends with the tokenizer's end-of-document token.
        ftfy: Whether to repair wrongly decoded characters with the `ftfy` library before encoding.
        pile_sets: The data sets of the Pile whose records are kept. If empty, all records are kept.

    Raises:
        CorpusError: `ftfy` is True and the library is not installed.
    """

    # The value of `meta.pile_set_name` in a record must be in `pile_sets`.

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    ftfy: bool = False
    pile_sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ftfy:
            with needs_package("ftfy", "--ftfy", CorpusError):
                import ftfy  # noqa: F401


@dataclass
class Encoded:
    """The tokens of a chunk, that is, of a piece of an input.

    Attributes:
        source: The index of the input in the list of inputs.
        number: The number of the chunk in its input, from 1.
        position: The number of bytes of the input up to the end of the chunk.
        sizes: For each key of the records, the number of tokens in each document, int32.
        tokens: For each key of the records, the concatenated tokens of all documents.
        counts: Maps what is counted, such as "documents", to the count for this chunk.
        faults: A printable text for each faulty record, with the record's place and the reason.
        documents: A pair (text, meta data) for each document of the first key. The list is empty
            unless the run writes an archive.
    """

    # The keys are `EncodeOptions.keys`, and `counts` has the keys `CHUNK_COUNTS`.

    source: int
    number: int
    position: int
    sizes: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHUNK_COUNTS, 0))
    faults: list[str] = field(default_factory=list)
    documents: list[tuple[str, Any]] = field(default_factory=list)


CHUNK_COUNTS = (*COUNTS, "faults")


class Encoder:
    """A callable that encodes the texts of a `Chunk`.

    Args:
        keep: Whether the result also contains the text and meta data of each document.
    """

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions, keep: bool = False) -> None:
        self.tokenizer, self.options, self.keep = tokenizer, options, keep
        tokenizer.load()

    def __call__(self, chunk: Chunk) -> Encoded:
        out = Encoded(chunk.source, chunk.number, chunk.position)
        if chunk.fault is not None:
            out.faults.append(chunk.fault)
        texts: list[list[str]] = [[] for _ in self.options.keys]
        for values, meta in self._records(chunk, out):
            if self.keep and values[0]:
                out.documents.append((values[0], meta))
            for column, text in zip(texts, values, strict=True):
                if text:
                    column.append(text)
                else:
                    out.counts["empty_documents"] += 1
        for column in texts:
            self._encode(column, out)
        out.faults = [printable(fault) for fault in out.faults]
        out.counts["faults"] = len(out.faults)
        return out

    def _records(self, chunk: Chunk, out: Encoded) -> Iterator[tuple[list[str], Any]]:
        """Yield (texts, meta data) of each record to encode, with one text per key.

        The faults of faulty records are added to `out.faults`.
        """
        lines = enumerate((chunk.lines or b"").split(b"\n"), chunk.first)
        records = ((f"{chunk.where}:{n}", line) for n, line in lines if line.strip())
        for place, content in records if chunk.texts is None else chunk.texts:
            try:
                text = content.decode("utf-8-sig")
                if chunk.texts is not None:
                    values, meta = [text] * len(self.options.keys), {}
                else:
                    values, meta = self._values(text, out)
                if self.options.ftfy:
                    import ftfy

                    values = [ftfy.fix_text(value) for value in values]
                sizes = [len(v) if v.isascii() else len(utf8(v)) for v in values]
            except (DataError, ValueError) as error:
                out.faults.append(_describe(error, place))
                continue
            out.counts["text_bytes"] += sum(sizes)
            if values:
                yield values, meta

    def _values(self, line: str, out: Encoded) -> tuple[list[str], Any]:
        """Return the texts of a JSON record, one for each key, and its meta data.

        Raises:
            CorpusError: The record is not a JSON object with a text for each key.
            CorpusError: Only some data sets of the Pile are kept, but the record does not name its
                data set.
        """
        # The list of texts is empty if `pile_sets` does not select the record. If `pile_sets` is
        # given, the record must have a `meta.pile_set_name`.
        record = parse_json(line)
        keys, sets = self.options.keys, self.options.pile_sets
        if isinstance(record, str) and keys == ("text",) and not sets:
            return [record], {}  # lm_dataformat can write a string instead of an object
        if isinstance(record, list):
            raise CorpusError(f"is a JSON array; {_ONE_A_LINE}")
        if not isinstance(record, dict):
            raise CorpusError(f"is not a JSON object with a key {keys[0]!r}")
        if sets:
            meta = record.get("meta")
            name = meta.get("pile_set_name") if isinstance(meta, dict) else None
            if name is None:
                raise CorpusError("has no meta.pile_set_name to choose by")
            if name not in sets:
                out.counts["left_out_by_set"] += 1
                return [], meta
        return [_value(record, key) for key in keys], record.get("meta", {})

    def _encode(self, texts: list[str], out: Encoded) -> None:
        """Encode the texts of one key and append their sizes and tokens to `out`."""
        tokenizer = self.tokenizer
        arrays = tokenizer.encode_batch(texts)
        begin = np.array(tokenizer.begin, tokenizer.dtype)
        end = np.full(int(self.options.append_eod), tokenizer.eod, tokenizer.dtype)
        sizes = np.fromiter(map(len, arrays), np.int32, len(arrays)) + len(begin) + len(end)
        arrays = [each for ids in arrays for each in (begin, ids, end)]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, tokenizer.dtype)
        out.sizes.append(sizes)
        out.tokens.append(tokens.astype(tokenizer.dtype.newbyteorder("<"), copy=False))
        out.counts["documents"] += len(texts)
        out.counts["tokens"] += len(tokens)


def _value(record: dict, key: str) -> str:
    if key not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "none"
        raise CorpusError(
            f"has no key {key!r} (its keys: {found}); name the key of the text: --text-key KEY"
        )
    value = record[key]
    if isinstance(value, list) and all(isinstance(paragraph, str) for paragraph in value):
        return _JOINER.join(value)
    if not isinstance(value, str):
        raise CorpusError(f"{key!r} is of type {type(value).__name__}, not a string")
    return value


def _describe(error: Exception, place: str) -> str:
    """Return a text with the place of a faulty record and the reason why it is faulty."""
    match error:
        case UnicodeDecodeError():
            if not place.rpartition(":")[2].isdigit():
                line = error.object.count(b"\n", 0, error.start) + 1
                place = f"{place}:{line}"
            byte = error.object[error.start]
            message = f"byte {byte:#04x} is not valid UTF-8; convert the file to UTF-8"
            message += ", or leave it out if it has no text (pictures, archives)"
        case json.JSONDecodeError():
            array = f"; {_ONE_A_LINE}" if error.doc.strip() in ("[", "{") else ""
            fault = error.msg.removesuffix(" at")
            message = f"is not JSON: {fault} at column {error.colno}{array}"
        case _:
            message = str(error)
    return f"{place}: {message}"
