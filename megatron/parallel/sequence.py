"""Describe how the positions of a sequence are split over ranks.

The context group `cp` splits the sequence into context slices. Under sequence parallelism, the
tensor-parallel group `tp` splits each context slice further. All hidden states from the embedding
to the output layer are split in this way.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.parallel.groups import ALONE, TensorGroup


@dataclass(frozen=True)
class SequenceSplit:
    """How the positions of a sequence are split over the ranks.

    Attributes:
        cp: The context-parallel group, which splits each sequence into equal slices.
        tp: The tensor-parallel group. Under sequence parallelism, it splits each context slice
            further.
    """

    tp: TensorGroup = ALONE
    cp: TensorGroup = ALONE

    @property
    def tp_slices(self) -> int:
        """The number of slices into which the tensor-parallel group splits a context slice."""
        return self.tp.size if self.tp.splits_sequence else 1

    @property
    def slices(self) -> int:
        """The number of slices into which both groups together split each sequence."""
        return self.cp.size * self.tp_slices

    def padded(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return token ids, padded at the end with zeros to a length that can be split."""
        return F.pad(tokens_BT, (0, -tokens_BT.shape[1] % self.slices))

    def context_slice(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return this rank's context slice of the sequences after padding (see `padded`)."""
        return self.padded(tokens_BT).chunk(self.cp.size, 1)[self.cp.rank]

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens in the full sequence, [length].

        Args:
            length: The number of positions in this rank's slice.
        """
        tp_rank = self.tp.rank if self.tp.splits_sequence else 0
        first = (self.cp.rank * self.tp_slices + tp_rank) * length
        return torch.arange(first, first + length, device=device)
