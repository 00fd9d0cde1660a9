"""Blend several corpora by weight into one order of samples, as GPT-NeoX does.

The weights w_d of the corpora d are normalised to the sum 1, and c_d counts how often corpus d was
chosen before sample i. Sample i comes from the corpus that lags most behind its weight:

    d        = the first corpus with the largest  w_d max(i, 1) - c_d    in float64
    sample i = sample number c_d of corpus d

Each choice depends only on earlier choices, so a longer blend starts with the same samples.
Each corpus has a sample index of its own (see `index.py`). For a blend of N samples, the index of
corpus d is built for ceil(1.005 N w_d) samples with the run's seed.

With `weight_by_num_documents`, the weights follow from the exponent alpha and the number of
documents n_d of each corpus:

    p_d = n_d / sum n;   q_d = p_d^alpha / sum p^alpha;   w_d = q_d (1 - p_d), normalised

The results equal those of GPT-NeoX (`data_utils.py`, `blendable_dataset.py`, `helpers.cpp`) bit for
bit. No compiled helper is needed.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.errors import DataError
from megatron.data.samples.base import Samples

_MAX_CORPORA = 254  # GPT-NeoX's limit, because it stores the number of the corpus in a byte
_SPARE = 1.005  # each corpus is indexed for 0.5% more samples than its weight needs
_LANES = 2048  # the number of segments of the order that are computed in parallel
_WARM_UP = 256  # extra steps before each segment, in which guessed counts approach the true ones


def normalized(weights: Sequence[float]) -> list[float]:
    """Return the weights, scaled so that their sum is 1.

    The config has checked that no weight is negative and that the sum is above 0.
    """
    total = sum(weights)
    return [weight / total for weight in weights]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """Return the weight of each corpus, computed from its number of documents n_d.

    The weight of corpus d is proportional to q_d (1 - p_d), where

        p_d = n_d / sum_c n_c   and   q_d = p_d^alpha / sum_c p_c^alpha.

    The sums are over all corpora c. The weights have the sum 1.

    Args:
        documents: The number of documents in each corpus.
        alpha: The exponent of p_d in q_d.
    """
    # The config key `weight_by_num_documents` selects these weights.
    if sum(map(bool, documents)) < 2:  # a split without documents has no samples
        return [float(n > 0 or not any(documents)) for n in documents]
    shares = normalized(documents)
    powers = normalized([share**alpha for share in shares])
    return normalized([power * (1 - p) for power, p in zip(powers, shares, strict=True)])


def samples_to_index(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Return for how many samples the index of each corpus is built, as in GPT-NeoX.

    Args:
        num_samples: The number of samples of the blend.
        weights: The weights of the corpora, normalised to the sum 1.
    """
    # This number is 0.5% larger than `num_samples` times the weight of the corpus.
    return [int(math.ceil(num_samples * weight * _SPARE)) for weight in weights]


def blend_choices(weights: np.ndarray, size: int) -> np.ndarray:
    """Choose a corpus (0, 1, ...) for each sample, as in GPT-NeoX.

    Args:
        weights: The weight of each corpus, float64, normalised to the sum 1.
        size: The number of samples.

    Returns:
        The corpus of each sample, uint8 [size].

    Raises:
        DataError: There are more than 254 corpora.
    """
    # Of i samples, a corpus with the weight w should get w * i. Each sample is drawn from the
    # corpus whose number of samples so far is furthest below this target.
    if len(weights) > _MAX_CORPORA:
        raise DataError(f"{len(weights)} corpora to blend: at most {_MAX_CORPORA}")
    # Each choice depends on how often each corpus was chosen before (its count). A plain loop over
    # the samples is slow, so all segments of the samples are computed in parallel, exactly:
    # 1. Guess the counts 256 samples before each segment, and choose corpora for these samples.
    #    This corrects most wrong guesses.
    # 2. Choose corpora for the samples of each segment.
    # 3. Where the counts at the end of a segment differ from those at the start of the next,
    #    compute the next segment again. Repeat this step until all counts agree.
    length = -(-size // _LANES)
    if length < 4 * _WARM_UP:
        counts = np.zeros((1, len(weights)))
        return _lockstep(weights, counts, np.zeros(1), size)[0]
    starts = np.arange(_LANES) * length
    begin = np.maximum(starts - _WARM_UP, 0)
    counts = np.floor(weights * begin[:, None])
    missing = begin - counts.sum(axis=1)  # lost by rounding down; given to the first corpora
    counts += np.arange(len(weights)) < missing[:, None]
    counts[starts == 0] = 0
    warm = starts > 0
    state = counts[warm]
    _lockstep(weights, state, begin[warm].astype(np.float64), _WARM_UP)
    counts[warm] = state
    choices = np.empty((_LANES, length), np.uint8)
    ends = counts.copy()
    todo = np.arange(_LANES)
    while len(todo):
        state = counts[todo].copy()
        choices[todo] = _lockstep(weights, state, starts[todo].astype(np.float64), length)
        ends[todo] = state
        todo = 1 + np.flatnonzero((ends[:-1] != counts[1:]).any(axis=1))
        counts[todo] = ends[todo - 1]
    return choices.reshape(-1)[:size]


def _lockstep(
    weights: np.ndarray, counts_BD: np.ndarray, step_B: np.ndarray, length: int
) -> np.ndarray:
    """Choose the corpora of B segments with `length` samples each, all segments in parallel.

    Args:
        weights: The weight of each of D corpora, [D].
        counts_BD: How often each corpus was chosen before each segment, [B, D]. Updated in place.
        step_B: The index of the first sample in each segment, [B].
        length: The number of samples in each segment.

    Returns:
        The corpus (0, 1, ...) chosen for each sample, uint8 [B, length].
    """
    rows = np.arange(len(step_B))
    choices = np.empty((len(step_B), length), np.uint8)
    for t in range(length):
        error_BD = weights * np.maximum(step_B + t, 1.0)[:, None] - counts_BD
        chosen_B = error_BD.argmax(axis=1)  # the first of equal errors, as in GPT-NeoX
        counts_BD[rows, chosen_B] += 1
        choices[:, t] = chosen_B
    return choices


class BlendedDataset(Samples):
    """A data set that draws its samples from several corpora, according to their weights.

    Args:
        build: A function of (d, number of samples, minimum length) that returns the data set of
            corpus d.
        weights: The weights of the corpora. Their sum need not be 1.
        num_samples: The number of samples of the blend.
        name: The name of the split ("train", ...), for error messages.
        extend_to: The minimum length of the data set. Additional samples come after the first
            `num_samples` samples.

    Attributes:
        choices: The corpus (0, 1, ...) of each sample, uint8 [length].

    Raises:
        DataError: There are more than 254 corpora.
    """

    # The additional samples do not change the first `num_samples` samples.

    def __init__(
        self,
        build: Callable[[int, int, int], Samples],
        weights: Sequence[float],
        num_samples: int,
        name: str,
        extend_to: int | None = None,
    ) -> None:
        self.name, self.num_samples = name, num_samples
        shares = normalized(weights)
        self.weights = np.array(shares, dtype=np.float64)
        self.weights /= np.sum(self.weights)
        self._length = max(num_samples, extend_to or 0)
        self.choices = blend_choices(self.weights, self._length)
        wide = np.int64 if self._length > np.iinfo(np.int32).max else np.int32
        self._number = np.empty(self._length, wide)  # each sample's number in its corpus
        self.datasets = []
        for d, indexed in enumerate(samples_to_index(num_samples, shares)):
            places = np.flatnonzero(self.choices == d)
            self._number[places] = np.arange(len(places))
            self.datasets.append(build(d, indexed, max(indexed, len(places))))
        self.seq_length = self.datasets[0].seq_length
        self.published_length = sum(dataset.published_length for dataset in self.datasets)
        self.where = ", ".join(dataset.where for dataset in self.datasets)

    def fill(self, out_NT: np.ndarray, indices_N: np.ndarray) -> None:
        choice_N, number_N = self.choices[indices_N], self._number[indices_N]
        for d in np.unique(choice_N):
            rows = np.flatnonzero(choice_N == d)
            out_NT[rows] = self.datasets[d].batch(number_N[rows])
