"""Find the documents in sequences of tokens, and number the tokens.

A document ends with the tokenizer's end-of-document token, which belongs to the document that it
ends. Sequences are cut from a long text, so their first and their last document may be incomplete.

Positions may also be drawn at random (Ruoss et al. 2023, arXiv 2305.16843): in training, the T
tokens of a sequence get a sorted random subset of 0 ... L - 1 as positions. The random numbers are
a hash of the tokens. Therefore, the positions do not depend on the layout of the ranks, and a
resumed run draws the same positions.
"""

from dataclasses import dataclass

import torch

from megatron.attention.call import document_starts


@dataclass(frozen=True)
class Documents:
    """The rules that divide sequences into documents and count positions.

    Attributes:
        end: The id of the end-of-document token. None means that tokens attend to all documents.
        restart_positions: Whether positions are counted from the start of each document.
        drawn_from: The number of positions from which training draws a random subset. 0 means that
            positions are not random.
    """

    end: int | None
    restart_positions: bool = False
    drawn_from: int = 0

    def starts(self, tokens_BT: torch.Tensor, training: bool = False) -> torch.Tensor:
        """Return the index of the first token of each token's document, int64 [batch, tokens].

        If `training` is true and positions are random, return each token's index minus its random
        position instead.
        """
        if self.end is not None:
            return document_starts(tokens_BT == self.end)
        if not training:
            return torch.zeros_like(tokens_BT)
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device) - self._drawn(tokens_BT)

    def _drawn(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return random positions for each sequence, all different and sorted."""
        length, device = tokens_BT.shape[1], tokens_BT.device
        # The random numbers depend only on the tokens.
        place_T = _mixed(torch.arange(1, length + 1, device=device))
        seed_B1 = _mixed((tokens_BT * place_T).sum(1, keepdim=True))
        keys_BL = _mixed(seed_B1 + torch.arange(max(self.drawn_from, length), device=device))
        return keys_BL.topk(length).indices.sort().values

    def positions(
        self, starts_BS: torch.Tensor, positions_T: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the position of each token in its document, int64 [batch, positions].

        Return None if positions are counted from the start of the sequence.

        Args:
            starts_BS: The index of the first token of each token's document, for all tokens of the
                sequences, [batch, tokens].
            positions_T: The indices of the tokens whose positions are returned. None means all
                tokens.
        """
        if not (self.restart_positions or self.drawn_from):
            return None
        if positions_T is None:
            return torch.arange(starts_BS.shape[1], device=starts_BS.device) - starts_BS
        return positions_T - starts_BS[:, positions_T]


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return a hash of each number, int64."""
    # The last steps of MurmurHash3.
    for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
        x = (x ^ (x >> 33)) * factor
    return x ^ (x >> 33)
