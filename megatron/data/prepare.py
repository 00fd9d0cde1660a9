"""Documents of text to a data set of tokens: PREFIX.bin, PREFIX.idx and PREFIX.json, the manifest.

Each document is encoded and closed by the tokenizer's eod; empty documents are left out, as
GPT-NeoX's `preprocess_data.py` does, and counted. The manifest says what the tokens are: tokenizer,
counts, source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from .errors import CorpusError, ShardError, TokenizerError
from .mmap import MMapIndexedDatasetWriter, shard_path
from .tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20  # text handed to the tokenizer at a time


class Document(NamedTuple):
    """One document: its text, where it stands (for messages), its bytes there (for progress)."""

    text: str
    where: str
    source_bytes: int


def write_shards(
    documents: Iterable[Document],
    prefix: str | os.PathLike,
    tokenizer: Tokenizer,
    *,
    append_eod: bool = True,
    source: dict,
    total_bytes: int | None = None,
    label: str = "tokenising",
    quiet: bool = False,
) -> dict:
    """Encode `documents` into the shards `prefix`; return the manifest (with `source` in it).

    Shows a progress bar (rate, time left if `total_bytes` is known) unless `quiet`. Raises
    CorpusError if there is no document with text; then, and after any other exception, no data set
    is left behind.
    """
    counts = {"documents": 0, "empty_documents": 0, "tokens": 0, "text_bytes": 0}
    with (
        MMapIndexedDatasetWriter(prefix, tokenizer.dtype) as writer,
        tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, disable=quiet) as bar,
    ):
        for batch in _batches(documents):
            texts = [document.text for document in batch if document.text]
            counts["empty_documents"] += len(batch) - len(texts)
            for ids in _encode(tokenizer, batch, texts):
                if append_eod:
                    ids = np.append(ids, ids.dtype.type(tokenizer.eod))
                writer.add_document(ids)
                counts["tokens"] += len(ids)
            counts["documents"] += len(texts)
            counts["text_bytes"] += sum(len(text.encode()) for text in texts)
            bar.update(sum(document.source_bytes for document in batch))
        if not counts["documents"]:
            raise CorpusError(
                f"{source.get('files') or source}: no document with text in it; nothing is written"
            )
        manifest = {
            "format": 1,
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
            "append_eod": append_eod,
            "dtype": tokenizer.dtype.name,
            **counts,
            "source": source,
        }
        writer.manifest = (json.dumps(manifest, indent=2) + "\n").encode()
    return manifest


def read_manifest(prefix: str | os.PathLike) -> dict | None:
    """The manifest beside the shards, or None (others write none); ShardError if damaged."""
    path = shard_path(prefix, ".json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ShardError(
            f"{path}: is not a manifest ({error}); remove it, or rebuild the data"
        ) from None
    return manifest if isinstance(manifest, dict) and "tokenizer_fingerprint" in manifest else None


def check_tokenizer(prefix: str | os.PathLike, tokenizer: Tokenizer) -> None:
    """ShardError if the manifest says that another tokenizer made the shards."""
    manifest = read_manifest(prefix)
    if manifest and manifest["tokenizer_fingerprint"] != tokenizer.fingerprint():
        raise ShardError(
            f"{prefix}: was made with {manifest.get('tokenizer')} (fingerprint "
            f"{manifest['tokenizer_fingerprint'][:12]}), not with this run's {tokenizer.name} "
            f"({tokenizer.fingerprint()[:12]}): set tokenizer_type, vocab_file and merge_file to "
            "those of the data, or prepare the data again"
        )


def text_documents(paths: list[Path], text_key: str = "text") -> Iterator[Document]:
    """Documents of `.jsonl` files (`text_key` of each line) and `.txt` files (one each)."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _jsonl_documents(path, text_key)
        else:
            content = path.read_bytes()
            yield Document(_decode(content, path, 1), str(path), len(content))


def check_inputs(paths: list[Path]) -> int:
    """Total bytes of `paths`; CorpusError, naming every one at fault, if one cannot be an input."""
    faults = []
    for path in paths:
        if not path.is_file():
            kind = "a folder, not a file" if path.is_dir() else "no such file"
            faults.append(f"{path}: {kind}")
        elif path.suffix not in (".jsonl", ".txt"):
            faults.append(
                f"{path}: unknown kind {path.suffix or '(no suffix)'!r}; give .jsonl or .txt files"
            )
        elif path.stat().st_size == 0:
            faults.append(f"{path}: is empty")
    if faults:
        raise CorpusError("\n".join(faults))
    return sum(path.stat().st_size for path in paths)


def _jsonl_documents(path: Path, text_key: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            text = _decode(line, path, number)
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                fault = error.msg.removesuffix(" at")
                raise CorpusError(
                    f"{path}:{number}: is not JSON: {fault} at column {error.colno}"
                ) from None
            except RecursionError:
                raise CorpusError(f"{path}:{number}: is nested too deeply") from None
            if not isinstance(record, dict):
                raise CorpusError(f"{path}:{number}: is not a JSON object with a key {text_key!r}")
            if text_key not in record:
                found = ", ".join(map(repr, list(record)[:8])) or "none"
                raise CorpusError(f"{path}:{number}: has no key {text_key!r} (its keys: {found})")
            if not isinstance(record[text_key], str):
                raise CorpusError(
                    f"{path}:{number}: {text_key!r} is a {type(record[text_key]).__name__}, "
                    "not a string"
                )
            yield Document(record[text_key], f"{path}:{number}", len(line))


def _decode(content: bytes, path: Path, first_line: int) -> str:
    """UTF-8, without a byte order mark. CorpusError with file and line."""
    try:
        return content.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise CorpusError(
            f"{path}:{line}: byte {content[error.start]:#04x} is not valid UTF-8; "
            "convert the file to UTF-8"
        ) from None


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.source_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: list[Document], texts: list[str]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_batch(texts)
    except TokenizerError:
        for document in batch:  # say in which document it is
            try:
                tokenizer.encode(document.text)
            except TokenizerError as error:
                raise CorpusError(f"{document.where}: {error}") from None
        raise
