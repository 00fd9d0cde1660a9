"""The data set of one split: samples by number, in GPT-NeoX's order (see `index.py`).

Sample i = 0, 1, ... of `TokenDataset` consists of seq_length + 1 tokens. Its inputs are all tokens
except the last, and its labels are all tokens except the first.

`TokenDataset` always has at least `num_samples` samples. GPT-NeoX's data set omits the last sample
of its index, so it may have only `num_samples` - 1 samples. GPT-NeoX then ends training one batch
early. `published_length` is the length of GPT-NeoX's data set.

GPT-NeoX's order depends on the number of samples for which its index was built. An index for a
larger `train_iters` would therefore reorder all samples, including those that training has already
consumed. To train longer, pass the `num_samples` that the checkpoint records, and a larger
`extend_to`. The data set then starts with the samples of the index for `num_samples`. Blocks 1, 2,
... of further samples follow. Block k is GPT-NeoX's order of one epoch, shuffled with the run's
seed plus k. (If one epoch is shorter than a sample, the block has more epochs.) Increasing
`extend_to` never changes earlier samples. Within the index and within each block, no sample occurs
twice.
"""

import os

import numpy as np

from megatron.data.errors import ShardError
from megatron.data.samples.base import Samples
from megatron.data.samples.index import IndexArguments, SampleIndex, build_sample_index
from megatron.data.samples.index_cache import cached_sample_index
from megatron.data.shards.interface import Shards


class TokenDataset(Samples):
    """The samples of one split of some token shards, in GPT-NeoX's order.

    The data set covers complete epochs, so it may have more than `num_samples` samples.

    Args:
        documents: (start, end). The split includes document `start` and excludes document `end`.
        num_samples: The number of samples that the run plans. It determines the order of the
            samples.
        name: The name of the split ("train", ...).
        cache_dir: The folder in which the order of the samples is stored. None means that the order
            is not stored.
        extend_to: The minimum length of the data set, or None. Additional samples come last.

    Attributes:
        index: GPT-NeoX's sample index for the planned number of samples. The index does not contain
            the samples that `extend_to` adds.

    Raises:
        ShardError: The split has no documents or no tokens, or the tokens in the shards are not
            integers.
    """

    # A checkpoint must record `num_samples`. The name appears in error messages and in the names of
    # cache folders. The stored sample index is memory-mapped.

    remedy = "raise train_iters (or extend_to), or give more data"

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
        self.where = shards.prefix
        self.num_samples, self.seq_length, self.seed = num_samples, seq_length, seed
        start, end = documents
        if shards.dtype.kind not in "iu":
            raise ShardError(f"{shards.prefix}.idx: holds {shards.dtype.name} numbers, not tokens")
        if start == end:
            raise ShardError(
                f"{shards.prefix}: the {name} split has no documents (of {len(shards)}); change "
                "`split`, or give more data"
            )
        self._cache_dir = cache_dir
        self.index = self._index(num_samples, seed)
        self.published_length = max(0, self.index.num_built - 1)
        self._length = max(self.published_length, num_samples)
        self._blocks = [self.index]
        # The number of the first sample in each block, then the total number of samples.
        self._block_starts = [0, self.index.num_built]
        if extend_to is not None:
            self._length = max(self._length, extend_to)
            while self._block_starts[-1] < self._length:
                block = self._index(1, seed + len(self._blocks))
                self._blocks.append(block)
                self._block_starts.append(self._block_starts[-1] + block.num_built)

    def fill(self, out_NT: np.ndarray, indices_N: np.ndarray) -> None:
        if len(self._blocks) == 1:
            self._fill_from(out_NT, self._blocks[0], indices_N)
            return
        block_N = np.searchsorted(self._block_starts, indices_N, side="right") - 1
        for b in np.unique(block_N):
            rows = np.flatnonzero(block_N == b)
            of_block_NT = np.empty((len(rows), self.seq_length + 1), dtype=np.int64)
            self._fill_from(of_block_NT, self._blocks[b], indices_N[rows] - self._block_starts[b])
            out_NT[rows] = of_block_NT

    def _fill_from(self, out_NT: np.ndarray, index: SampleIndex, numbers_N: np.ndarray) -> None:
        """Write sample number `numbers_N[i]` of `index` to row i of `out_NT`, for each i."""
        cut_N = index.shuffle_idx[numbers_N].astype(np.int64)
        begin_N2, end_N2 = index.sample_idx[cut_N], index.sample_idx[cut_N + 1]
        # A sample consists of one piece from each of several consecutive documents. Piece p of the
        # batch is the slice begin_P[p] : end_P[p] of `shards.tokens`, and the pieces, in order,
        # fill the rows of `out_NT` without a gap.
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
        wanted = IndexArguments(
            self.shards.sizes, self.documents, num_samples, self.seq_length, seed
        )
        if self._cache_dir is None:
            return build_sample_index(wanted)
        return cached_sample_index(self._cache_dir, self.name, wanted)
