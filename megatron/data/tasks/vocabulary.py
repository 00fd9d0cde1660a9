"""The tokenizer of a length task. Its tokens are words, separated by spaces in text."""

from collections.abc import Sequence

import numpy as np

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers.base import END_OF_DOCUMENT, Tokenizer
from megatron.suggest import did_you_mean


class TaskTokenizer(Tokenizer):
    """A tokenizer whose tokens are the words of a given list. The id 0 ends a document.

    Attributes:
        words: The word of each id.
        ids: Maps each word to its id.
    """

    name = "TaskTokenizer"
    eod = 0

    def __init__(self, words: Sequence[str]) -> None:
        self.words = (END_OF_DOCUMENT, *words)
        self.ids = {word: number for number, word in enumerate(self.words)}
        self.vocab_size = len(self.words)

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        for word in words:
            if word not in self.ids:
                hint = did_you_mean(word, self.words)
                raise TokenizerError(
                    f"{word!r} is no token of this task; {hint}write tokens with spaces between "
                    f"them, of {' '.join(self.words)}"
                )
        return np.array([self.ids[word] for word in words], self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the words of `ids`, with a space before each word."""
        return self.decode_runs(ids, lambda run: "".join(f" {self.words[i]}" for i in run))

    def count_bytes(self, table: np.ndarray) -> None:
        table[:] = [len(word.encode()) + 1 for word in self.words]

    def _content(self) -> bytes:
        return "\n".join(self.words).encode()
