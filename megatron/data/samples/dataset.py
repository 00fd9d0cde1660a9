"""Samples of a split, by number, in the published order (see `index.py`).

`TokenDataset` numbers samples 0, 1, .... Sample i holds seq_length + 1 tokens; its inputs are [:-1]
and its labels [1:].

The published data set leaves out the last sample that it built (`published_length`), even if one
sample is then missing, and its loader ends a batch early. `TokenDataset` always has all
`num_samples`.

Order beyond the index (`extend_to`): the published order depends on the number of samples it was
built for, so raising `train_iters` would reorder samples that were already consumed. Instead, the
index for the recorded `num_samples` is kept, and its samples come first. Further blocks follow.
Block k = 1, 2, ... is the published order of one epoch (of more epochs only if one holds no sample)
with seed + k. The order is thus one endless sequence. Extending it never changes earlier samples,
and no sample occurs twice in the index or in one block.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.samples.index import SampleIndex, build_sample_index
from megatron.data.samples.index_cache import cached_sample_index
from megatron.data.samples.interface import checked_indices
from megatron.data.shards.interface import Shards


class TokenDataset:
    """`Samples` of documents [start, end) of `shards`: those of complete epochs.

    There are at least `num_samples` of them.

    Args:
        num_samples: the order depends on it, so a checkpoint must record it.
        name: "train", ...; it occurs in messages and in the names of cache folders.
        cache_dir: where the index is kept and mapped from; None keeps it in memory alone.
        extend_to: at least so many samples; see the module docstring.

    Raises:
        ShardError: the split has no documents or no tokens, or the shards hold no integers.
        ValueError: the shards do not have these documents.
    """

    def __init__(
        self,
        shards: Shards,
        documents: tuple[int, int],
        num_samples: int,
        seq_length: int,
        seed: int,
        name: str,
        cache_dir: str | os.PathLike | None = None,
        extend_to: int | None = None,
    ) -> None:
        self.shards, self.documents, self.name = shards, documents, name
        self.num_samples, self.seq_length, self.seed = num_samples, seq_length, seed
        start, end = documents
        if not 0 <= start <= end <= len(shards):
            raise ValueError(f"documents {documents} of {len(shards)}")
        if shards.dtype.kind not in "iu":
            raise ShardError(f"{shards.prefix}.idx: holds {shards.dtype.name} numbers, not tokens")
        if start == end:
            raise ShardError(
                f"{shards.prefix}: the {name} split has no documents (of {len(shards)}); change "
                "`split`, or give more data"
            )
        self._cache_dir = cache_dir
        first = self._index(num_samples, seed)
        self.published_length = max(0, first.num_built - 1)
        self._length = max(self.published_length, num_samples)
        self._blocks = [first]
        # The number of each block's first sample, then the end.
        self._block_starts = [0, first.num_built]
        if extend_to is not None:
            self._length = max(self._length, extend_to)
            while self._block_starts[-1] < self._length:
                block = self._index(1, seed + len(self._blocks))
                self._blocks.append(block)
                self._block_starts.append(self._block_starts[-1] + block.num_built)

    def __len__(self) -> int:
        return self._length

    @property
    def where(self) -> str:
        """The files, for messages."""
        return self.shards.prefix

    @property
    def index(self) -> SampleIndex:
        """The published index, built for `num_samples`."""
        return self._blocks[0]

    def batch(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [n, seq_length + 1]: the samples `indices`, built in one buffer.

        Raises:
            DataExhausted: there is no such sample.
        """
        remedy = "raise train_iters (or extend_to), or give more data"
        indices_N = checked_indices(self, indices, remedy)
        out_NT = np.empty((len(indices_N), self.seq_length + 1), dtype=np.int64)
        if len(self._blocks) == 1:
            self._fill(out_NT, self._blocks[0], indices_N)
            return out_NT
        block_N = np.searchsorted(self._block_starts, indices_N, side="right") - 1
        for b in np.unique(block_N):
            rows = np.flatnonzero(block_N == b)
            of_block_NT = np.empty((len(rows), self.seq_length + 1), dtype=np.int64)
            self._fill(of_block_NT, self._blocks[b], indices_N[rows] - self._block_starts[b])
            out_NT[rows] = of_block_NT
        return out_NT

    def _fill(self, out_NT: np.ndarray, index: SampleIndex, numbers_N: np.ndarray) -> None:
        """Write samples `numbers_N` of one index into the rows of `out_NT`."""
        cut_N = index.shuffle_idx[numbers_N].astype(np.int64)
        begin_N2, end_N2 = index.sample_idx[cut_N], index.sample_idx[cut_N + 1]
        # A sample is one piece of each document it touches. All pieces of the batch, in order, are
        # begin_P to end_P of the flat tokens; they fill the rows without a gap.
        pieces_N = end_N2[:, 0] - begin_N2[:, 0] + 1
        first_N = np.cumsum(pieces_N) - pieces_N  # each sample's first piece
        last_N = first_N + pieces_N - 1
        place_P = np.repeat(begin_N2[:, 0] - first_N, pieces_N) + np.arange(pieces_N.sum())
        document_P = index.doc_idx[place_P]
        begin_P = self.shards.pointers[document_P] // self.shards.dtype.itemsize
        end_P = begin_P + self.shards.sizes[document_P]
        end_P[last_N] = begin_P[last_N] + end_N2[:, 1] + 1
        begin_P[first_N] += begin_N2[:, 1]
        filled_P = np.cumsum(end_P - begin_P)
        out, tokens, at = out_NT.reshape(-1), self.shards.tokens, 0
        pieces = zip(begin_P.tolist(), end_P.tolist(), filled_P.tolist(), strict=True)
        for begin, end, filled in pieces:
            out[at:filled] = tokens[begin:end]
            at = filled

    def _index(self, num_samples: int, seed: int) -> SampleIndex:
        arguments = (self.shards.sizes, self.documents, num_samples, self.seq_length, seed)
        if self._cache_dir is None:
            return build_sample_index(*arguments)
        return cached_sample_index(self._cache_dir, self.name, *arguments)
