"""The order of training samples, that is, which tokens make up sample i.

The documents of a split are repeated for E epochs, shuffled together and concatenated. This gives
one sequence of E * T tokens, where T is the number of tokens in the split. The sequence is cut at
every L-th token, where L = seq_length. Piece s starts at token s L and has L + 1 tokens, so its
last token is also the first token of the next piece. A second shuffle gives the training order:

    N                                   the number of samples that were requested
    E = max(1, ceil((N L + 1) / T))     the fewest epochs that give N samples
    S = (E T - 1) // L                  the number of samples built, at least N
    doc_idx     int32 [E * documents]   the shuffled document numbers
    sample_idx  int32 [S + 1, 2]        (place in doc_idx, offset in that document) of token s L
    shuffle_idx uint32 [S]              sample i of the training order is piece shuffle_idx[i]

`sample_idx` is int64 if int32 is too small, and `shuffle_idx` is int64 if uint32 is too small. One
`numpy.random.RandomState(seed)` shuffles first doc_idx and then shuffle_idx. The first entry of
`sample_idx` is always (0, 0), even if the first document has no tokens. No other entry refers to a
document without tokens.

The arrays equal those of GPT-NeoX (Megatron-LM's `gpt2_dataset.py` and `helpers.cpp`) bit for bit.
No compiled helper is needed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.data.errors import ShardError

# The number of documents plus cuts that are handled at a time. With chunks of this size, temporary
# arrays fit into the processor's cache and do not grow with the number of documents.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class SampleIndex:
    """The order of training samples.

    The documents of all epochs are shuffled, concatenated and cut into pieces. Each piece is one
    sample, and the pieces are shuffled as well.

    Attributes:
        doc_idx: The shuffled document numbers, [epochs * documents].
        sample_idx: Where each piece starts, [samples + 1, 2]. A row contains an index into doc_idx,
            and the offset of the piece's first token in that document.
        shuffle_idx: For each sample, the number of its piece, [samples].
    """

    doc_idx: np.ndarray
    sample_idx: np.ndarray
    shuffle_idx: np.ndarray

    @property
    def num_built(self) -> int:
        """The number of samples in the index."""
        return len(self.shuffle_idx)


def num_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Return the smallest number of epochs that contain at least `num_samples` samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


class IndexArguments(NamedTuple):
    """The values that determine a sample index.

    Attributes:
        sizes: The number of tokens in each document of the shards, int32.
        documents: (start, end). The split includes document `start` and excludes document `end`.
        num_samples: The minimum number of samples in the index. 0 means one epoch.
        seq_length: The number of inputs in a sample. A sample has `seq_length` + 1 tokens.
        seed: The seed of the two shuffles.
    """

    sizes: np.ndarray
    documents: tuple[int, int]
    num_samples: int
    seq_length: int
    seed: int


def build_sample_index(arguments: IndexArguments) -> SampleIndex:
    """Build GPT-NeoX's sample index of a split.

    Raises:
        ShardError: The split has no tokens.
    """
    # Samples have `seq_length` + 1 tokens.
    sizes, (start, end), num_samples, seq_length, seed = arguments
    tokens_per_epoch = int(sizes[start:end].sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise ShardError(
            f"the {end - start} documents of this split hold no tokens; give the split more "
            "weight, or more data"
        )
    epochs = num_epochs(tokens_per_epoch, seq_length, num_samples)
    rng = np.random.RandomState(seed)
    doc_idx = np.tile(np.arange(start, end, dtype=np.int32), epochs)
    rng.shuffle(doc_idx)
    sample_idx = cut_samples(sizes, doc_idx, seq_length, epochs * tokens_per_epoch)
    built = len(sample_idx) - 1
    wide = built >= np.iinfo(np.uint32).max - 1
    shuffle_idx = np.arange(built, dtype=np.int64 if wide else np.uint32)
    rng.shuffle(shuffle_idx)
    return SampleIndex(doc_idx, sample_idx, shuffle_idx)


def sample_idx_dtype(num_built: int, num_places: int) -> type:
    """Return int32 if it is wide enough for the values of `sample_idx`, otherwise int64.

    Args:
        num_built: The number of samples in the index.
        num_places: The length of `doc_idx`.
    """
    # See `SampleIndex`.
    # GPT-NeoX's rule is that int32 can represent the number of entries of the array.
    limit = np.iinfo(np.int32).max
    return np.int32 if 2 * (num_built + 1) < limit and num_places <= limit else np.int64


def cut_samples(
    sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int, total_tokens: int
) -> np.ndarray:
    """Return where the concatenated documents are cut into samples of `seq_length` inputs.

    Args:
        sizes: The number of tokens in each document of the shards.
        doc_idx: The numbers of the documents, in the order of their concatenation.
        total_tokens: The number of tokens in the concatenated documents.

    Returns:
        The place of each cut, [cuts, 2]: an index into `doc_idx`, and the offset in that document.
        The start of the first sample counts as a cut.
    """
    built = (total_tokens - 1) // seq_length
    cuts_S2 = np.empty((built + 1, 2), dtype=sample_idx_dtype(built, len(doc_idx)))
    chunk = max(256, _CHUNK * len(doc_idx) // (len(doc_idx) + built))
    done, row_start = 0, 0  # number of cuts found; number of the chunk's first token
    for chunk_start in range(0, len(doc_idx), chunk):
        sizes_C = sizes.take(doc_idx[chunk_start : chunk_start + chunk])
        ends_C = np.cumsum(sizes_C, dtype=np.int64)
        chunk_tokens = int(ends_C[-1])
        first_token = done * seq_length - row_start  # token of the first cut in the chunk
        cut_tokens_K = np.arange(first_token, chunk_tokens, seq_length)
        count = len(cut_tokens_K)
        # The place of a token is the number of documents that end at or before it. Few places are
        # found by binary search, many by counting the documents that end between two cuts.
        if count * 8 < len(ends_C):
            place_K = np.searchsorted(ends_C, cut_tokens_K, side="right")
        else:
            cuts_before_end_C = (ends_C + (seq_length - 1 - first_token)) // seq_length
            place_K = np.bincount(cuts_before_end_C, minlength=count)[:count].cumsum()
        rows = slice(done, done + count)
        starts_K = ends_C.take(place_K) - sizes_C.take(place_K)
        np.subtract(cut_tokens_K, starts_K, out=cuts_S2[rows, 1], casting="unsafe")
        np.add(place_K, chunk_start, out=cuts_S2[rows, 0], casting="unsafe")
        done += count
        row_start += chunk_tokens
    cuts_S2[0] = 0  # even if the first documents have no tokens
    return cuts_S2
