"""Keep the keys and values of earlier tokens, so that generation does not compute them again.

A batch continues texts of different lengths. Each text is padded at its start, so that all texts
end at the same column of the batch. The tokens of a text do not see its padding. Positions are
counted from the text's first token:

    column          0  1  2  3  4  5
    a long text     a  b  c  d  e  f        position = column
    a short text    -  -  -  a  b  c        position = column - 3

With a sliding window, columns that no later token sees are dropped. All other columns are "kept".

Legend: B texts, T new columns, S kept columns, H heads, K key heads, E head size.
"""

import torch
from torch import Tensor

SPARE = 256
"""The number of columns by which a full cache grows. Growing copies the kept columns. This costs
less than attention, which reads all kept columns for every new column."""


class LayerCache:
    """The cached keys and values of one layer.

    With a window, the cache drops tokens that no later query sees.

    Args:
        padding_B: The number of padding tokens before each text.
        window: The largest distance at which a query sees a key. None means any distance.
    """

    def __init__(self, padding_B: Tensor, window: int | None = None):
        self.padding_B, self.window = padding_B, window
        self._hidden_B = padding_B  # the number of first columns that no later token sees
        self._padded = bool(padding_B.any())
        self._first = self._count = self._room = 0  # columns: the first one kept, kept, allocated
        self._buffers: list[Tensor] = []

    @property
    def columns(self) -> int:
        """The number of columns so far: padding, prompt and generated tokens.

        Dropped columns count, too.
        """
        return self._first + self._count

    def positions(self, count: int, *, in_document: bool = False) -> Tensor:
        """Return the positions of the next `count` tokens of each text, int64 [batch, count].

        The positions are counted from the first token of the text, or of the document that has not
        been forgotten. Padding gets the position 0.
        """
        first_B = self._hidden_B if in_document else self.padding_B
        column_T = torch.arange(count, device=first_B.device) + self.columns
        return (column_T - first_B[:, None]).clamp(min=0)

    def extend(
        self, k_BKTE: Tensor, v_BKTE: Tensor, decay_BHT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]:
        """Add the keys and values of new tokens, and return the inputs of these tokens' attention.

        Args:
            k_BKTE, v_BKTE: The new keys and values [batch, key heads, new tokens, head size].
            decay_BHT: The sums of log-decays from the first new token on. None without forget
                gates.

        Returns:
            (keys, values, decays, starts, offset). Keys and values are [batch, key heads, columns,
            head size]. A column is an index into the cached tokens, padding included. `decays`
            are the sums of log-decays, or None without forget gates. `starts` is None if no text
            is padded. Otherwise, `starts` is [batch, columns]. For a token, it has the column at
            which the token's text starts. For padding, it has 0. `offset` is the column of the
            first new token.
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
        return k_BKSE, v_BKSE, decay[0] if decay else None, self._starts(), offset

    def forget(self, ended_B: Tensor, *, restart: bool) -> None:
        """Hide all tokens so far from later tokens, in the texts whose document has ended.

        Args:
            ended_B: Whether the last column so far ends a document, or is padding with that id.
            restart: Whether the positions of a document are counted from its own first token.
        """
        ended_B = ended_B & (self.padding_B < self.columns)
        self._hidden_B = torch.where(ended_B, self.columns, self._hidden_B)
        self.padding_B = self._hidden_B if restart else self.padding_B
        self._padded = True

    def _make_room(self, new: list[Tensor]) -> None:
        """Allocate larger buffers, and copy the columns that later queries need.

        The larger buffers have room for the tensors `new`. These are the new tokens' keys and
        values. With forget gates, a third tensor contains the decays.
        """
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
        start_B1 = (self._hidden_B - self._first).clamp(min=0)[:, None]
        column_S = torch.arange(self._count, device=start_B1.device)
        return torch.where(column_S < start_B1, 0, start_B1)
