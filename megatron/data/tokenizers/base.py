"""Text to token ids and back.

| type | vocabulary | end of document (eod) |
|---|---|---|
| `ByteLevelTokenizer` | the 256 bytes of UTF-8, then eod | 256 |
| `CharLevelTokenizer` | the bytes of UTF-8; 512 entries, as in GPT-NeoX | 0, the NUL byte |
| `GPT2BPETokenizer` | vocab.json + merges.txt, byte-level BPE | id of `<|endoftext|>` |
| `HFTokenizer` | a tokenizer.json of the `tokenizers` library | id of `<|endoftext|>` |
| `SPMTokenizer` | a .model of `sentencepiece` (optional) | id of `<|endoftext|>` |

`GPT2BPETokenizer` treats the text "<|endoftext|>" as plain text, as the published one does;
`HFTokenizer` treats it as its tokenizer.json says. `CharLevelTokenizer` decodes to the text that
was encoded; GPT-NeoX's maps every id below 32, line ends included, to a space. Ids come as arrays
of the dtype that shards store them in (`shard_format.best_dtype`).
"""

from __future__ import annotations

import difflib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron.data.errors import TokenizerError
from megatron.data.shards.format import best_dtype

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer(ABC):
    """What the rest of the stack knows of a tokenizer."""

    name: str
    vocab_size: int  # not padded
    eod: int

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of one text, without eod."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; bytes that are no UTF-8 and ids of no token become U+FFFD."""

    @abstractmethod
    def _byte_table(self) -> np.ndarray:
        """int64 [vocab_size]: UTF-8 bytes that each token stands for, 0 for eod."""

    @abstractmethod
    def _content(self) -> bytes:
        """Whatever tells two tokenizers of one type apart."""

    @cached_property
    def dtype(self) -> np.dtype:
        """The dtype of ids in shards."""
        return best_dtype(self.vocab_size)

    def load(self) -> None:  # noqa: B027  most have nothing to build
        """Build now what the first text would wait for: before processes are forked that share
        it."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def token_bytes(self, ids: np.ndarray) -> np.ndarray:
        """int64 of the shape of `ids`: UTF-8 bytes of text each token stands for; 0 for eod."""
        ids = np.asarray(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids.max() if ids.min() >= 0 else ids.min()
            raise TokenizerError(
                f"{self.name}: token id {wrong} is outside its vocabulary of "
                f"{self.vocab_size}; the data was made with another tokenizer"
            )
        return self._bytes_of_token.take(ids)

    def fingerprint(self) -> str:
        """SHA-256 (hex) that two tokenizers share only if they give the same ids."""
        return hashlib.sha256(self.name.encode() + b"\x00" + self._content()).hexdigest()

    @cached_property
    def _bytes_of_token(self) -> np.ndarray:
        return self._byte_table()


class ByteLevelTokenizer(Tokenizer):
    """The bytes of the text, as they are."""

    name = "ByteLevelTokenizer"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        parts, start = [], 0
        for at in [*np.flatnonzero((ids < 0) | (ids > 255)), len(ids)]:
            parts.append(ids[start:at].astype(np.uint8).tobytes())
            if at < len(ids):
                parts.append((END_OF_DOCUMENT if ids[at] == self.eod else "\ufffd").encode())
            start = at + 1
        return b"".join(parts).decode("utf-8", errors="replace")

    def _byte_table(self) -> np.ndarray:
        table = np.zeros(self.vocab_size, np.int64)
        table[:256] = 1
        table[self.eod] = 0
        return table

    def _content(self) -> bytes:
        return b"1"


class CharLevelTokenizer(ByteLevelTokenizer):
    """GPT-NeoX's: bytes too, but 512 entries and eod 0."""

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return super().decode(ids).replace("\x00", END_OF_DOCUMENT)


_TYPES = (
    "ByteLevelTokenizer",
    "CharLevelTokenizer",
    "GPT2BPETokenizer",
    "HFTokenizer",
    "SPMTokenizer",
)
_LATER = ("HFGPT2Tokenizer", "TiktokenTokenizer")  # GPT-NeoX's other types


def build_tokenizer(
    type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    backend: str = "auto",
) -> Tokenizer:
    """Build a tokenizer by GPT-NeoX's `tokenizer_type`, in any case. Raises TokenizerError.

    `backend`: which library encodes, for GPT2BPETokenizer (`fast.py`).
    """
    by_lower = {name.lower(): name for name in (*_TYPES, *_LATER)}
    name = by_lower.get((type or "").lower())
    if name in _LATER:
        raise TokenizerError(
            f"tokenizer_type: {name} is not built yet; use one of {', '.join(_TYPES)}"
        )
    if name is None:
        short = (type or "").lower()
        near = difflib.get_close_matches(short, by_lower, n=1)
        near = near or [known for known in by_lower if short and known.startswith(short)]
        hint = f"did you mean {by_lower[near[0]]}? " if near else ""
        raise TokenizerError(
            f"tokenizer_type: unknown type {type!r}; {hint}known: {', '.join(_TYPES)}"
        )
    if name == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if name == "CharLevelTokenizer":
        return CharLevelTokenizer()
    # Imported here: the modules need libraries that bytes do not.
    if name == "SPMTokenizer":
        from megatron.data.tokenizers.sentencepiece import SPMTokenizer

        return SPMTokenizer(_required(name, "vocab_file", vocab_file, "tokenizer.model"))
    from megatron.data.tokenizers.bpe import GPT2BPETokenizer, HFTokenizer

    if name == "HFTokenizer":
        return HFTokenizer(_required(name, "vocab_file", vocab_file, "tokenizer.json"))
    return GPT2BPETokenizer(
        _required(name, "vocab_file", vocab_file, "vocab.json"),
        _required(name, "merge_file", merge_file, "merges.txt"),
        backend,
    )


def _required(name: str, key: str, path: str | Path | None, usual: str) -> Path:
    if path is None:
        flag = f"--{key.replace('_', '-')}"
        raise TokenizerError(f"{key} ({flag}): {name} needs it (usually called {usual})")
    if not Path(path).is_file():
        raise TokenizerError(f"{key}: {path}: no such file")
    return Path(path)


def utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} is {text[error.start]!a}, half of a surrogate "
            "pair, which UTF-8 cannot hold"
        ) from None
