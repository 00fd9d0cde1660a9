"""Describe how the positions of a sequence are split over ranks.

The context group `cp` splits the sequence into context slices. Under sequence parallelism, the
tensor-parallel group `tp` splits each context slice further. All hidden states from the embedding
to the output layer are split in this way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.parallel.groups import ALONE, TensorGroup


@dataclass(frozen=True)
class SequenceSplit:
    """How sequences are split over the context group `cp`, and then over the tensor-parallel group.

    The tensor-parallel group `tp` splits sequences only under sequence parallelism. All slices have
    the same length. Rank r of a group has slice r.
    """

    tp: TensorGroup = ALONE
    cp: TensorGroup = ALONE

    @property
    def tp_slices(self) -> int:
        """The number of ranks of `tp` that split the sequence, 1 without sequence parallelism."""
        return self.tp.size if self.tp.splits_sequence else 1

    @property
    def slices(self) -> int:
        """The number of slices into which each sequence is split."""
        return self.cp.size * self.tp_slices

    def padded(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return `tokens_BT`, padded at the end with zeros to a multiple of `slices` positions."""
        return F.pad(tokens_BT, (0, -tokens_BT.shape[1] % self.slices))

    def context_slice(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Pad the sequences, and return one of `cp.size` equal slices: number `cp.rank`."""
        return self.padded(tokens_BT).chunk(self.cp.size, 1)[self.cp.rank]

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens in the full sequence, [length].

        Args:
            length: The number of positions in this rank's slice.
        """
        tp_rank = self.tp.rank if self.tp.splits_sequence else 0
        first = (self.cp.rank * self.tp_slices + tp_rank) * length
        return torch.arange(first, first + length, device=device)
