"""The interface of every tokenizer. A tokenizer turns text into token ids and back.

| type | vocabulary | id of the end-of-document token (eod) |
|---|---|---|
| `ByteLevelTokenizer` | the 256 byte values, then eod | 256 |
| `CharLevelTokenizer` | the 256 byte values, padded to 512 as in GPT-NeoX | 0, the NUL byte |
| `GPT2BPETokenizer` | byte-level BPE from vocab.json and merges.txt | that of `<|endoftext|>` |
| `HFTokenizer` | a tokenizer.json of the `tokenizers` library | that of `<|endoftext|>` |
| `SPMTokenizer` | a .model of the optional `sentencepiece` library | that of `<|endoftext|>` |

If a tokenizer.json has no `<|endoftext|>`, its eod is the `eos_token` of the tokenizer_config.json
in the same folder. If a .model has no `<|endoftext|>`, its eod is the end-of-sentence token `</s>`.

The tokens of a document have three parts. The tokens of a prompt have only the first two parts:

    begin     the tokens that the template of a tokenizer.json puts before a text (BOS), else none
    encode    the tokens of the text alone
    eod       one end-of-document token, even if the template also puts one after a text

If a text contains the characters "<|endoftext|>", `GPT2BPETokenizer` encodes them as ordinary text,
as GPT-NeoX does. `HFTokenizer` encodes them as its tokenizer.json prescribes. `CharLevelTokenizer`
decodes ids to exactly the text that was encoded. (The GPT-NeoX class of this name decodes every id
below 32, even a line end, to a space.) Arrays of ids have the dtype that `best_dtype` returns.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from megatron.data.errors import TokenizerError

END_OF_DOCUMENT = "<|endoftext|>"


def best_dtype(vocab_size: int) -> np.dtype:
    """Return GPT-NeoX's dtype for token ids: uint16 if `vocab_size` < 65,500, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class Tokenizer(ABC):
    """The interface of every tokenizer.

    Attributes:
        name: The type of the tokenizer, such as "GPT2BPETokenizer".
        vocab_size: The number of ids, without the padding that a model may add.
        eod: The id of the token that ends a document.
        begin: The ids of the tokens that begin a document, such as a BOS token. Often empty.
        ends: The ids of the tokens that end a generated text: `eod`, and the `eos_token` of a
            tokenizer_config.json beside a tokenizer.json, which may end a turn of a chat.
    """

    name: str
    vocab_size: int
    eod: int
    begin: tuple[int, ...] = ()
    _bytes_left_out = 0

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids [n] of `text`, without added tokens such as BOS."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`. Invalid UTF-8 and ids outside the vocabulary become U+FFFD."""

    @abstractmethod
    def count_bytes(self, table: np.ndarray) -> None:
        """Count the UTF-8 bytes of each token, and write the numbers into `table`.

        Some tokenizers drop a space at the start of a text. The bytes of a token are counted as in
        the middle of a text, where no space is dropped.

        Args:
            table: An array of zeros, int64 [vocab_size]. Any value may be written for the
                end-of-document token.
        """
        # If `decode` drops the space at the start of a text, this method also sets
        # `_bytes_left_out` to 1.

    @abstractmethod
    def _content(self) -> bytes:
        """Return bytes that distinguish this tokenizer from other tokenizers of the same type."""
        # Two tokenizers that encode some text differently return different bytes.

    @cached_property
    def ends(self) -> set[int]:
        return {self.eod}

    @cached_property
    def dtype(self) -> np.dtype:
        """The dtype of token ids in shards."""
        return best_dtype(self.vocab_size)

    def load(self) -> None:  # noqa: B027  most tokenizers have nothing to build
        """Build the encoder now, so that forked processes share it."""
        # Otherwise it is built at the first `encode`.

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of `text`, preceded by the ids in `self.begin`.

        If the token ids of `text` already start with the ids in `self.begin`, nothing is added.
        """
        ids, begin = self.encode(text).tolist(), list(self.begin)
        return ids if ids[: len(begin)] == begin else begin + ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text."""
        return [self.encode(text) for text in texts]

    def decode_runs(
        self, ids: Sequence[int] | np.ndarray, decode: Callable[[list[int]], str]
    ) -> str:
        """Return the text of `ids`, with U+FFFD for each id outside the vocabulary.

        Args:
            decode: The function that decodes a list of ids, all in the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64)
        unknown = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        runs = [run[1:] if n else run for n, run in enumerate(np.split(ids, unknown))]
        return "\ufffd".join(decode(run.tolist()) for run in runs)

    def token_bytes(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of UTF-8 bytes of each token, as int64 in the shape of `ids`.

        An end-of-document token has 0 bytes.

        Args:
            ids: Consecutive tokens, [..., n]. The first token is assumed to lie in the middle of a
                document.

        Raises:
            TokenizerError: An id is outside the vocabulary.
        """
        # The numbers of all tokens of a document add up to the number of bytes of its decoded text.
        ids = np.asarray(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids.max() if ids.min() >= 0 else ids.min()
            raise TokenizerError(
                f"{self.name}: token id {wrong} is outside its vocabulary of "
                f"{self.vocab_size}; the data was made with another tokenizer"
            )
        counts = self._bytes_of_token.take(ids)
        if self._bytes_left_out:
            ends = np.isin(ids[..., :-1], [self.eod, *self.begin])
            counts[..., 1:] -= self._bytes_left_out * (ends & (counts[..., 1:] > 0))
        return counts

    def fingerprint(self) -> str:
        """Return a SHA-256 (hex) that identifies the tokenizer.

        Two tokenizers have different fingerprints if they encode at least one text differently.
        """
        return hashlib.sha256(self.name.encode() + b"\x00" + self._content()).hexdigest()

    @cached_property
    def _bytes_of_token(self) -> np.ndarray:
        table = np.zeros(self.vocab_size, np.int64)
        self.count_bytes(table)
        table[self.eod] = 0
        return table


def utf8(text: str) -> bytes:
    """Encode `text` as UTF-8.

    Raises:
        TokenizerError: `text` contains an unpaired surrogate.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} is {text[error.start]!a}, half of a surrogate "
            "pair, which UTF-8 cannot hold"
        ) from None


def check_utf8(texts: Sequence[str]) -> None:
    """Check that each text can be encoded as UTF-8.

    Raises:
        TokenizerError: A text contains an unpaired surrogate.
    """
    # Without this check, tokenizer libraries would silently replace the faulty characters.
    for text in texts:
        if not text.isascii():
            utf8(text)


@contextmanager
def fault_in_file(message: str) -> Iterator[None]:
    """Turn any error of the `with` block into a TokenizerError. The block reads or uses a file.

    Args:
        message: The start of the text of the TokenizerError.
    """
    try:
        yield
    except BaseException as error:  # Rust's panics are no Exceptions
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise TokenizerError(f"{message}: {error}") from error
