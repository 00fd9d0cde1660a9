"""The interface of every tokenizer: text to token ids and back.

| type | vocabulary | end of document (eod) |
|---|---|---|
| `ByteLevelTokenizer` | the 256 bytes of UTF-8, then eod | 256 |
| `CharLevelTokenizer` | the bytes of UTF-8; 512 entries, as in GPT-NeoX | 0, the NUL byte |
| `GPT2BPETokenizer` | vocab.json + merges.txt, byte-level BPE | id of `<|endoftext|>` |
| `HFTokenizer` | a tokenizer.json of the `tokenizers` library | id of `<|endoftext|>` |
| `SPMTokenizer` | a .model of `sentencepiece` (optional) | id of `<|endoftext|>` |

`GPT2BPETokenizer` treats the text "<|endoftext|>" as plain text, as the published tokenizer does;
`HFTokenizer` follows its tokenizer.json. `CharLevelTokenizer` decodes to the text that was encoded;
GPT-NeoX's maps every id below 32, line ends included, to a space. Arrays of ids have the dtype of
the shards (`best_dtype`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from megatron.data.errors import TokenizerError

END_OF_DOCUMENT = "<|endoftext|>"


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype of ids in GPT-NeoX's shards: uint16 below 65,500 entries, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class Tokenizer(ABC):
    """The interface of every tokenizer.

    `vocab_size` is not padded; `eod` is the id that ends a document.
    """

    name: str
    vocab_size: int
    eod: int

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of one text, without eod."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; invalid UTF-8 and ids outside the vocabulary become U+FFFD."""

    @abstractmethod
    def _byte_table(self) -> np.ndarray:
        """int64 [vocab_size]: number of UTF-8 bytes of each token, 0 for eod."""

    @abstractmethod
    def _content(self) -> bytes:
        """Bytes that differ between two tokenizers of this type unless their ids are equal."""

    @cached_property
    def dtype(self) -> np.dtype:
        """The dtype of ids in shards."""
        return best_dtype(self.vocab_size)

    def load(self) -> None:  # noqa: B027  most tokenizers have nothing to build
        """Build what the first text needs, so that forked processes share it."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode_runs(
        self, ids: Sequence[int] | np.ndarray, decode: Callable[[list[int]], str]
    ) -> str:
        """`decode` of each run of known ids, joined by U+FFFD for each unknown id."""
        ids = np.asarray(ids, dtype=np.int64)
        unknown = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        runs = [run[1:] if n else run for n, run in enumerate(np.split(ids, unknown))]
        return "\ufffd".join(decode(run.tolist()) for run in runs)

    def token_bytes(self, ids: np.ndarray) -> np.ndarray:
        """Number of UTF-8 bytes of each token, 0 for eod: int64, in the shape of `ids`.

        Raises:
            TokenizerError: if an id is outside the vocabulary.
        """
        ids = np.asarray(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids.max() if ids.min() >= 0 else ids.min()
            raise TokenizerError(
                f"{self.name}: token id {wrong} is outside its vocabulary of "
                f"{self.vocab_size}; the data was made with another tokenizer"
            )
        return self._bytes_of_token.take(ids)

    def fingerprint(self) -> str:
        """SHA-256 (hex); equal only for tokenizers that give the same ids."""
        return hashlib.sha256(self.name.encode() + b"\x00" + self._content()).hexdigest()

    @cached_property
    def _bytes_of_token(self) -> np.ndarray:
        return self._byte_table()


def utf8(text: str) -> bytes:
    """`text` in UTF-8; TokenizerError for half a surrogate pair."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} is {text[error.start]!a}, half of a surrogate "
            "pair, which UTF-8 cannot hold"
        ) from None


def check_utf8(texts: Sequence[str]) -> None:
    """Raise TokenizerError if a text cannot be encoded as UTF-8; libraries would replace it."""
    for text in texts:
        if not text.isascii():
            utf8(text)


@contextmanager
def fault_in_file(message: str) -> Iterator[None]:
    """Turn any error of the library that reads a tokenizer's file into a TokenizerError."""
    try:
        yield
    except Exception as error:  # the libraries raise bare Exceptions
        raise TokenizerError(f"{message}: {error}") from error
