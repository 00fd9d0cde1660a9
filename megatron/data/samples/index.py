"""The order of training samples: which tokens make up sample i.

The documents of a split, repeated for E epochs, are shuffled together and laid end to end. They
form one row of E * T tokens, where T is the number of tokens in the split. With L = seq_length, the
row is cut at every L-th token. Sample s holds the L + 1 tokens [s L, s L + L], so it shares one
token with its neighbour:

    E = max(1, ceil((N L + 1) / T))     the fewest epochs that give N samples
    S = (E T - 1) // L                  samples built, >= N
    doc_idx     int32 [E * documents]   document at each place of the row
    sample_idx  int32 [S + 1, 2]        (place in doc_idx, offset in that document) of token s L
    shuffle_idx uint32 [S]              sample i of the training order is cut shuffle_idx[i]

`sample_idx` is int64 if int32 is too small, `shuffle_idx` is int64 from 2^32 - 1 samples on. Both
shuffles draw from one `numpy.random.RandomState(seed)`, first doc_idx, then shuffle_idx. A boundary
never falls on a document without tokens, except for the first boundary, which is always (0, 0).
This is the order of GPT-NeoX (Megatron-LM's `gpt2_dataset.py` and `helpers.cpp`), bit for bit,
computed without a compiled helper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.data.errors import ShardError

# Documents plus cuts handled at a time. A chunk's work arrays stay in the processor's cache, and
# the extra memory does not grow with the number of documents.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class SampleIndex:
    """The three arrays described in the module docstring."""

    doc_idx: np.ndarray
    sample_idx: np.ndarray
    shuffle_idx: np.ndarray

    @property
    def num_built(self) -> int:
        """S, the number of samples that the arrays describe."""
        return len(self.shuffle_idx)


def num_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """E of the module docstring: the fewest complete epochs that hold `num_samples` samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_sample_index(
    sizes: np.ndarray,
    documents: tuple[int, int],
    num_samples: int,
    seq_length: int,
    seed: int,
) -> SampleIndex:
    """Build the published order for `num_samples` samples of `seq_length` + 1 tokens.

    Args:
        sizes: int32 [all documents of the shards], tokens in each.
        documents: (start, end) of the split.
        num_samples: 0 gives one epoch.

    Raises:
        ShardError: the split holds no tokens.
    """
    if seq_length < 1 or num_samples < 0:
        raise ValueError(f"seq_length {seq_length} must be >= 1, num_samples {num_samples} >= 0")
    start, end = documents
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
    """int32 if the number of entries (GPT-NeoX's rule) and the places fit it, otherwise int64."""
    limit = np.iinfo(np.int32).max
    return np.int32 if 2 * (num_built + 1) < limit and num_places <= limit else np.int64


def cut_samples(
    sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int, total_tokens: int
) -> np.ndarray:
    """Return `sample_idx` [S + 1, 2]: where in the row of documents every seq_length-th token lies.

    Token t belongs to the first document that ends after it, so its place is the number of
    documents that end at or before t. If cuts are dense, no search is needed: count the documents
    that end between neighbouring cuts (`bincount`) and sum the counts. The work is done in chunks,
    so the extra memory is constant.
    """
    built = (total_tokens - 1) // seq_length
    cuts_S2 = np.empty((built + 1, 2), dtype=sample_idx_dtype(built, len(doc_idx)))
    chunk = max(256, _CHUNK * len(doc_idx) // (len(doc_idx) + built))
    done, row_start = 0, 0  # cuts written so far; first token of the chunk in the row
    for chunk_start in range(0, len(doc_idx), chunk):
        sizes_C = sizes.take(doc_idx[chunk_start : chunk_start + chunk])
        ends_C = np.cumsum(sizes_C, dtype=np.int64)
        chunk_tokens = int(ends_C[-1])
        first_token = done * seq_length - row_start  # first cut, in [0, L)
        cut_tokens_K = np.arange(first_token, chunk_tokens, seq_length)
        count = len(cut_tokens_K)
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
    cuts_S2[0] = 0  # also if the first documents have no tokens
    return cuts_S2
