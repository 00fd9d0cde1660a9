"""Tokenizers that run in the `tokenizers` library: a tokenizer.json, and GPT-2's two files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from . import fast
from .errors import TokenizerError
from .tokenizer import END_OF_DOCUMENT, Tokenizer, utf8


class HFTokenizer(Tokenizer):
    """A tokenizer.json, through the `tokenizers` library."""

    name = "HFTokenizer"

    def __init__(self, vocab_file: str | Path) -> None:
        try:
            text = Path(vocab_file).read_text(encoding="utf-8")
            canonical = json.dumps(json.loads(text), sort_keys=True)
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{vocab_file}: is not a tokenizer.json: {error}") from error
        self._set_up(backend, str(vocab_file), canonical)

    def _set_up(self, backend, source: str, canonical: str) -> None:
        """`canonical` is what the fingerprint covers; the library's dump varies by version."""
        self._backend, self._canonical = backend, canonical
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(len(vocabulary), max(vocabulary.values(), default=-1) + 1)
        eod = vocabulary.get(END_OF_DOCUMENT)
        if eod is None:
            raise TokenizerError(f"{source}: has no token {END_OF_DOCUMENT}, which ends a document")
        self.eod = eod

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        try:
            encodings = self._backend.encode_batch_fast(texts)
        except (UnicodeEncodeError, TypeError) as error:
            for text in texts:
                utf8(text)  # says which character it was
            raise TokenizerError(f"{self.name}: {error}") from error
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        unknown = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        runs = [run[1:] if n else run for n, run in enumerate(np.split(ids, unknown))]
        return "\ufffd".join(
            self._backend.decode(run.tolist(), skip_special_tokens=False) for run in runs
        )

    def _byte_table(self) -> np.ndarray:
        # Byte-level vocabularies write each byte as one character; added tokens stand as they are.
        added = self._backend.get_added_tokens_decoder()
        byte_level = "ByteLevel" in repr(self._backend.decoder)
        table = np.zeros(self.vocab_size, np.int64)
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i in added:
                table[i] = 0 if added[i].special else len(token.encode())
            elif byte_level:
                table[i] = len(token)
            else:
                table[i] = len(self._backend.decode([i]).encode())
        table[self.eod] = 0
        return table

    def _content(self) -> bytes:
        return self._canonical.encode()


class GPT2BPETokenizer(HFTokenizer):
    """GPT-2's byte-level BPE from its two files.

    `backend`, the library that encodes (the ids are the same, so the fingerprint is too):

    - "tokenizers", the reference, which always works;
    - "tiktoken", several times as fast; for GPT-2's own merges only, where its rule (merge the
      pair of lowest rank, whatever it was made of) is known to give the same ids;
    - "gigatoken", optional and faster still; each run checks it against the reference
      (`fast.py`), which refuses it where it differs;
    - "auto": tiktoken for GPT-2's own merges where it is installed, else tokenizers; `backend` then
      says which.
    """

    name = "GPT2BPETokenizer"

    def __init__(
        self, vocab_file: str | Path, merge_file: str | Path, backend: str = "auto"
    ) -> None:
        vocabulary = _read_vocabulary(vocab_file)
        merges = _read_merges(merge_file, vocabulary)
        try:
            reference = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(
                f"{vocab_file} and {merge_file} do not fit together: {error}"
            ) from error
        reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        reference.decoder = decoders.ByteLevel()
        self._set_up(reference, str(vocab_file), json.dumps([vocabulary, merges], sort_keys=True))
        self.backend = fast.choose(backend, vocabulary, merges)
        self._fast = fast.build(self.backend, vocabulary, reference)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        if self._fast is None:
            return super().encode_batch(texts)
        for text in texts:
            if not text.isascii():
                utf8(text)  # half a surrogate pair: tiktoken would replace it
        encoded = self._fast(texts)
        for ids in encoded:
            if len(ids) and ids.max() >= self.vocab_size:  # narrowed, it would be another token
                raise TokenizerError(f"{self.backend}: gave the id {ids.max()}, which is none")
        return [ids.astype(self.dtype) for ids in encoded]

    def reference_batch(self, texts: list[str]) -> list[np.ndarray]:
        """`encode_batch` by the reference library."""
        return super().encode_batch(texts)


def _read_vocabulary(path: str | Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: is not GPT-2's vocab.json: {error}") from None
    if not isinstance(vocabulary, dict) or not all(type(i) is int for i in vocabulary.values()):
        raise TokenizerError(f"{path}: is not GPT-2's vocab.json: not an object of tokens and ids")
    if missing := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary)):
        raise TokenizerError(f"{path}: lacks the byte symbols {''.join(missing[:20])!r}")
    return vocabulary


def _read_merges(path: str | Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise TokenizerError(f"{path}: is not GPT-2's merges.txt: {error}") from None
    # The first line is a version, not a merge.
    for number, line in enumerate(lines[1:], start=2):
        pair = tuple(line.split())
        if pair and (len(pair) != 2 or "".join(pair) not in vocabulary):
            raise TokenizerError(
                f"{path}:{number}: {line!r} is not a merge of two tokens into one of the vocabulary"
            )
        if pair:
            merges.append(pair)
    return merges
