"""A tokenizer for SentencePiece models. It needs the optional `sentencepiece` library."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.errors import TokenizerError, needs_package
from megatron.data.tokenizers.base import END_OF_DOCUMENT, Tokenizer, fault_in_file, utf8


class SPMTokenizer(Tokenizer):
    """A tokenizer read from a SentencePiece .model file. It adds no BOS token."""

    # The token that ends a document is the piece `<|endoftext|>`, as in GPT-NeoX. If the model does
    # not have this piece, the token is the model's end-of-sentence piece, such as `</s>`.

    name = "SPMTokenizer"

    def __init__(self, vocab_file: str | Path) -> None:
        with needs_package("sentencepiece", "SPMTokenizer", TokenizerError):
            import sentencepiece
        self._model = Path(vocab_file).read_bytes()
        with fault_in_file(f"{vocab_file}: is not a SentencePiece model"):
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=self._model)
            self.vocab_size = self._pieces.get_piece_size()
            # Also finds pieces that are not valid UTF-8.
            self._names: list[str] = self._pieces.id_to_piece(list(range(self.vocab_size)))
            own = self._pieces.eos_id()
        named = END_OF_DOCUMENT in self._names
        # Where there is no such piece, GPT-NeoX silently uses the unknown token.
        self.eod = self._names.index(END_OF_DOCUMENT) if named else own
        if self.eod < 0:
            raise TokenizerError(
                f"{vocab_file}: has neither a piece {END_OF_DOCUMENT} nor an end of a sentence, "
                f"which end a document; train it with user_defined_symbols={END_OF_DOCUMENT}"
            )

    def encode(self, text: str) -> np.ndarray:
        utf8(text)
        return np.array(self._pieces.encode(text), dtype=self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.decode_runs(ids, self._pieces.decode)

    def count_bytes(self, table: np.ndarray) -> None:
        for i in range(self.vocab_size):
            if self._pieces.is_byte(i):
                table[i] = 1
            elif not (self._pieces.is_control(i) or self._pieces.is_unused(i)):
                table[i] = len(self._names[i].replace("\u2581", " ").encode())
        ids = self._pieces.encode("a")
        self._bytes_left_out = max(0, int(table.take(ids).sum()) - len(self.decode(ids).encode()))

    def _content(self) -> bytes:
        return self._model
