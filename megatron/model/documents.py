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
    """The rule by which sequences of tokens are divided into documents.

    A model has this rule only if each token attends only to tokens of its own document.

    Attributes:
        end: The id of the end-of-document token.
        restart_positions: Whether positions are counted from the first token of each document.
            Otherwise they are counted from the first token of the sequence.
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
        """Return the position of each token in its document, int64 [B, T].

        Return None if `restart_positions` is false.

        Args:
            starts_BS: The result of `starts` for the full sequences.
            positions_T: The position of each token in the sequence. None means all positions.
        """
        if not self.restart_positions:
            return None
        if positions_T is None:
            return torch.arange(starts_BS.shape[1], device=starts_BS.device) - starts_BS
        return positions_T - starts_BS[:, positions_T]
