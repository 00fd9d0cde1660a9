"""Find the documents in sequences of tokens.

A document ends with the tokenizer's end-of-document token, which belongs to the document that it
ends. Sequences are cut from a long text, so their first and their last document may be incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.attention.call import document_starts


@dataclass(frozen=True)
class Documents:
    """The documents in the sequences of a model whose tokens attend only to their own document.

    Attributes:
        end: The id of the end-of-document token.
        restart_positions: Whether position 0 is the first token of each document. Otherwise it is
            the first token of the sequence.
    """

    end: int
    restart_positions: bool = False

    def starts(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return, for each token, the position of its document's first token, int64 [B, T].

        Positions are counted from the sequence's first token.
        """
        return document_starts(tokens_BT == self.end)

    def positions(
        self, starts_BS: torch.Tensor, positions_T: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return positions in documents, int64 [B, T], or None without `restart_positions`.

        Args:
            starts_BS: The result of `starts` for the full sequences.
            positions_T: The positions in the sequence to convert. None means all positions.
        """
        if not self.restart_positions:
            return None
        if positions_T is None:
            return torch.arange(starts_BS.shape[1], device=starts_BS.device) - starts_BS
        return positions_T - starts_BS[:, positions_T]
