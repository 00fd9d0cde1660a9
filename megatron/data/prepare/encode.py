"""A chunk of text to tokens: what a worker process does.

A fault in a record names its place and leaves the other records of the chunk as they are; whether
it ends the run is for `prepare.py` to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron.data.errors import CorpusError, TokenizerError
from megatron.data.prepare.chunks import Chunk
from megatron.data.tokenizers.base import Tokenizer

_ONE_A_LINE = "write one JSON object a line, e.g. with jq -c '.[]'"
_JOINER = "\n\n"  # lm_dataformat's, between the paragraphs of a text that is a list


@dataclass(frozen=True)
class EncodeOptions:
    """What becomes of a record.

    `keys`: keys of a record, each with shards of its own. `ftfy`: mend the text's encoding first,
    with that library. `pile_sets`: keep only records whose meta.pile_set_name is one of these.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    ftfy: bool = False
    pile_sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ftfy:
            try:
                import ftfy  # noqa: F401
            except ImportError:
                raise CorpusError("--ftfy needs `pip install ftfy`") from None


@dataclass
class Encoded:
    """The tokens of a chunk: per key the documents' sizes (int32) and all their tokens."""

    source: int
    number: int
    position: int
    sizes: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


COUNTS = ("documents", "empty_documents", "left_out_by_set", "tokens", "text_bytes", "faults")


class Encoder:
    """Chunk -> Encoded, by one tokenizer and one set of options."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.tokenizer, self.options = tokenizer, options
        tokenizer.load()

    def __call__(self, chunk: Chunk) -> Encoded:
        out = Encoded(chunk.source, chunk.number, chunk.position)
        out.counts = dict.fromkeys(COUNTS, 0)
        if chunk.fault is not None:
            out.faults.append(chunk.fault)
        texts: list[list[str]] = [[] for _ in self.options.keys]
        for values in self._records(chunk, out):
            for column, text in zip(texts, values, strict=True):
                if text:
                    column.append(text)
                else:
                    out.counts["empty_documents"] += 1
        for column in texts:
            self._encode(column, out)
        out.counts["faults"] = len(out.faults)
        return out

    def _records(self, chunk: Chunk, out: Encoded) -> Iterator[list[str]]:
        """The texts of each record, one for each key, that can be encoded."""
        if chunk.texts is not None:
            parsed = ((place, [content]) for place, content in chunk.texts)
        else:
            lines = (chunk.lines or b"").split(b"\n")
            parsed = ((f"{chunk.where}:{n}", line) for n, line in enumerate(lines, chunk.first))
        for place, content in parsed:
            try:
                if isinstance(content, list):
                    values = [_text(content[0], place)] * len(self.options.keys)
                else:
                    if not content or content.isspace():
                        continue
                    values = self._values(_text(content, place), place, out)
                if values is None:
                    continue
                if self.options.ftfy:
                    import ftfy

                    values = [ftfy.fix_text(text) for text in values]
                sizes = [_utf8_size(text, place) for text in values]
            except CorpusError as error:
                out.faults.append(str(error))
                continue
            out.counts["text_bytes"] += sum(sizes)
            yield values

    def _values(self, line: str, place: str, out: Encoded) -> list[str] | None:
        """The texts of a JSON record; None if its set is not wanted."""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            fault = error.msg.removesuffix(" at")
            array = f"; {_ONE_A_LINE}" if line.strip() in ("[", "{") else ""
            raise CorpusError(
                f"{place}: is not JSON: {fault} at column {error.colno}{array}"
            ) from None
        except RecursionError:
            raise CorpusError(f"{place}: is nested too deeply") from None
        keys, sets = self.options.keys, self.options.pile_sets
        if isinstance(record, str) and keys == ("text",) and not sets:
            return [record]  # lm_dataformat's bare strings
        if isinstance(record, list):
            raise CorpusError(f"{place}: is a JSON array; {_ONE_A_LINE}")
        if not isinstance(record, dict):
            raise CorpusError(f"{place}: is not a JSON object with a key {keys[0]!r}")
        if sets:
            meta = record.get("meta")
            name = meta.get("pile_set_name") if isinstance(meta, dict) else None
            if name is None:
                raise CorpusError(f"{place}: has no meta.pile_set_name to choose by")
            if name not in sets:
                out.counts["left_out_by_set"] += 1
                return None
        return [_value(record, key, place) for key in keys]

    def _encode(self, texts: list[str], out: Encoded) -> None:
        """Append the shards of one key."""
        tokenizer = self.tokenizer
        arrays = tokenizer.encode_batch(texts)
        eod = np.full(1, tokenizer.eod, tokenizer.dtype)
        sizes = np.fromiter(map(len, arrays), np.int32, len(arrays))
        if self.options.append_eod:
            sizes += 1
            arrays = [part for ids in arrays for part in (ids, eod)]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, tokenizer.dtype)
        # A wrapped token would be a wrong token: the ids are checked before they are narrowed.
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
            raise TokenizerError(
                f"{tokenizer.name}: gave the id {tokens.max()}, outside its vocabulary of "
                f"{tokenizer.vocab_size}"
            )
        out.sizes.append(sizes)
        out.tokens.append(tokens.astype(tokenizer.dtype.newbyteorder("<"), copy=False))
        out.counts["documents"] += len(texts)
        out.counts["tokens"] += len(tokens)


def _value(record: dict, key: str, place: str) -> str:
    if key not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "none"
        raise CorpusError(f"{place}: has no key {key!r} (its keys: {found})")
    value = record[key]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return _JOINER.join(value)
    if not isinstance(value, str):
        raise CorpusError(f"{place}: {key!r} is of type {type(value).__name__}, not a string")
    return value


def _text(content: bytes, place: str) -> str:
    """UTF-8, without a byte order mark. CorpusError with the place and, in a text, the line."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        record = place.rpartition(":")[2].isdigit()
        raise CorpusError(
            f"{place if record else f'{place}:{line + 1}'}: byte {content[error.start]:#04x} is "
            "not valid UTF-8; convert the file to UTF-8"
        ) from None


def _utf8_size(text: str, place: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{place}: character {error.start} is {text[error.start]!a}, half of a surrogate "
            "pair, which UTF-8 cannot hold"
        ) from None
