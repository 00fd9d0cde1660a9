"""Keep the keys and values of earlier tokens, so that a text is continued without computing again.

A batch continues texts of different lengths. Each text is padded at its start, so that all texts
end at the same column of the batch. Padding is a document of its own, which the tokens of the text
do not see, and positions are counted from a text's first token:

    column          0  1  2  3  4  5
    a long text     a  b  c  d  e  f        position = column
    a short text    -  -  -  a  b  c        position = column - 3

Legend: B texts, T new columns, S columns that are kept, K key heads, E head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SPARE = 256
"""The columns for which a full cache makes room. While it grows, it copies what it keeps, which
costs less than attention, since attention reads all of it for every single column."""


class Kept(NamedTuple):
    """What attention needs for the new queries of one layer.

    Attributes:
        k_BKSE, v_BKSE: The keys and values that are kept, those of the new columns included.
        decay_BHS: The decay of the same columns, or None.
        starts_BS: The first column of each column's document, or None without padding. Column 0 is
            the first one that is kept.
        query_offset: The column of the first query.
    """

    k_BKSE: Tensor
    v_BKSE: Tensor
    decay_BHS: Tensor | None
    starts_BS: Tensor | None
    query_offset: int


class LayerCache:
    """The keys, values and decay of one layer.

    Memory is linear in the number of columns. With a window, it holds no more columns than the
    window, the new ones and `SPARE`.

    Args:
        padding_B: The number of columns before the first token of each text.
        window: The largest distance at which a query sees a key, or None.
    """

    def __init__(self, padding_B: Tensor, window: int | None = None):
        self.padding_B, self.window = padding_B, window
        self._padded = bool(padding_B.any())
        self._first = self._count = self._room = 0  # columns: the first one kept, kept, allocated
        self._buffers: list[Tensor] = []

    @property
    def columns(self) -> int:
        """The number of columns that were added, whether they are still kept or not."""
        return self._first + self._count

    def positions(self, count: int) -> Tensor:
        """Return the positions of the next `count` columns, int64 [B, count]. Padding has 0."""
        column_T = torch.arange(count, device=self.padding_B.device) + self.columns
        return (column_T - self.padding_B[:, None]).clamp(min=0)

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor, decay_BHT: Tensor | None) -> Kept:
        """Add new columns, and return what attention needs for their queries.

        Args:
            decay_BHT: The decay of the new columns, a sum that begins at the first of them.
        """
        if decay_BHT is not None and self._count:
            decay_BHT = decay_BHT + self._buffers[2][:, :, self._count - 1, None]
        new = [x for x in (k_BKTE, v_BKTE, decay_BHT) if x is not None]
        if self._count + k_BKTE.shape[2] > self._room:
            self._make_room(new)
        offset = self._count
        self._count += k_BKTE.shape[2]
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, offset : self._count] = x
        k_BKSE, v_BKSE, *decay = (buffer[:, :, : self._count] for buffer in self._buffers)
        return Kept(k_BKSE, v_BKSE, decay[0] if decay else None, self._starts(), offset)

    def _make_room(self, new: list[Tensor]) -> None:
        """Allocate buffers for the columns that later queries see and for those of `new`."""
        kept = self._count if self.window is None else min(self._count, self.window)
        begin, end = self._count - kept, self._count
        self._room = kept + max(SPARE, new[0].shape[2])
        self._first, self._count = self._first + begin, kept
        for index, x in enumerate(new):
            buffer = x.new_empty(*x.shape[:2], self._room, *x.shape[3:])
            if index < len(self._buffers):
                buffer[:, :, :kept] = self._buffers[index][:, :, begin:end]
                self._buffers[index] = buffer
            else:
                self._buffers.append(buffer)

    def _starts(self) -> Tensor | None:
        if not self._padded:
            return None
        start_B1 = (self.padding_B - self._first).clamp(min=0)[:, None]
        column_S = torch.arange(self._count, device=start_B1.device)
        return torch.where(column_S < start_B1, 0, start_B1)
