"""Tokenizers whose tokens are the bytes of the text in UTF-8. They need no vocabulary file."""

from collections.abc import Sequence

import numpy as np

from megatron.data.tokenizers.base import END_OF_DOCUMENT, Tokenizer, utf8


class ByteLevelTokenizer(Tokenizer):
    """A tokenizer whose ids are the UTF-8 bytes of the text. The id 256 ends a document."""

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

    def count_bytes(self, table: np.ndarray) -> None:
        table[:256] = 1

    def _content(self) -> bytes:
        return b"1"


class CharLevelTokenizer(ByteLevelTokenizer):
    """A tokenizer with the ids of GPT-NeoX's `CharLevelTokenizer`.

    The ids are the UTF-8 bytes of the text. The id 0 ends a document. The vocabulary size is 512.
    """

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return super().decode(ids).replace("\x00", END_OF_DOCUMENT)
