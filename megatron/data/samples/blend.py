"""Several corpora blended by weight into one order of samples, as GPT-NeoX blends them.

    choice i = first d with the largest  w_d max(i, 1) - c_d        c_d: times d was chosen before
    sample i = sample c_d of corpus d

in float64, w normalised to the sum 1. The rule looks back only, so the order is one endless
sequence: longer orders begin with the shorter ones. Corpus d is indexed for ceil(1.005 N w_d)
samples, all with the run's seed, where N is the number of samples asked for. With
`weight_by_num_documents`, the weights follow from the corpora's documents n_d and alpha:

    p_d = n_d / sum n;   q_d = p_d^alpha / sum p^alpha;   w_d = q_d (1 - p_d), normalised

All of this is GPT-NeoX's (`data_utils.py`, `blendable_dataset.py`, `helpers.cpp`), bit for bit,
without a compiled helper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.errors import DataError, DataExhausted
from megatron.data.samples.dataset import TokenDataset

_MAX_CORPORA = 254  # GPT-NeoX's: the choice is a byte
_SPARE = 1.005  # samples indexed a corpus, against what its weight asks for
_LANES = 2048  # stretches of the sequence computed side by side
_WARM_UP = 256  # steps a stretch runs before its own begin, to fall into the true state


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights to the sum 1. DataError if they have none."""
    total = sum(weights)
    if not (weights and math.isfinite(total) and total > 0 and min(weights) >= 0):
        raise DataError(f"weights {list(weights)}: must be >= 0 with a sum above 0")
    return [weight / total for weight in weights]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """Weights of corpora with these numbers of documents; see the module docstring."""
    if len(documents) == 1:
        return [1.0]
    total = sum(documents)
    shares = [n / total for n in documents]
    powers = [share**alpha for share in shares]
    total = sum(powers)
    weights = [power / total * (1 - share) for power, share in zip(powers, shares, strict=True)]
    total = sum(weights)
    return [weight / total for weight in weights]


def samples_to_index(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Samples that each corpus is indexed for; `weights` sum to 1."""
    return [int(math.ceil(num_samples * weight * _SPARE)) for weight in weights]


def blend_choices(weights: np.ndarray, size: int) -> np.ndarray:
    """uint8 [size]: which corpus each sample is taken from; `weights` float64, sum 1.

    Each step needs the counts before it, so the rule is a loop. Long orders are cut into stretches
    that are computed side by side from guessed counts; wrong guesses correct themselves in a few
    steps, because the rule always serves the corpus furthest behind. Where a stretch's begin is not
    the end of the one before, it is computed again from there: the result is the loop's.
    """
    if len(weights) > _MAX_CORPORA:
        raise DataError(f"{len(weights)} corpora to blend: at most {_MAX_CORPORA}")
    length = -(-size // _LANES)
    if length < 4 * _WARM_UP:
        counts = np.zeros((1, len(weights)))
        return _lockstep(weights, counts, np.zeros(1), size)[0]
    starts = np.arange(_LANES) * length
    begin = np.maximum(starts - _WARM_UP, 0)
    counts = np.floor(weights * begin[:, None])
    missing = begin - counts.sum(axis=1)  # so many are in the fractions: to the first corpora
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
    """uint8 [B, length]: `length` steps of the rule from each of B states, updated in place."""
    rows = np.arange(len(step_B))
    choices = np.empty((len(step_B), length), np.uint8)
    for t in range(length):
        error_BD = weights * np.maximum(step_B + t, 1.0)[:, None] - counts_BD
        chosen_B = error_BD.argmax(axis=1)  # the first of equal ones, as published
        counts_BD[rows, chosen_B] += 1
        choices[:, t] = chosen_B
    return choices


class BlendedDataset:
    """Blended samples, with the face of `TokenDataset`.

    `build(d, num_samples, extend_to)` makes corpus d's data set. There are `num_samples` samples
    in the published order, or up to `extend_to`, the order going on by the same rule.
    """

    def __init__(
        self,
        build: Callable[[int, int, int], TokenDataset],
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
        self._choice = blend_choices(self.weights, self._length)
        wide = np.int64 if self._length > np.iinfo(np.int32).max else np.int32
        self._number = np.empty(self._length, wide)  # the sample's number in its corpus
        self.datasets = []
        for d, indexed in enumerate(samples_to_index(num_samples, shares)):
            places = np.flatnonzero(self._choice == d)
            self._number[places] = np.arange(len(places))
            self.datasets.append(build(d, indexed, max(indexed, len(places))))
        self.seq_length = self.datasets[0].seq_length
        self.published_length = sum(dataset.published_length for dataset in self.datasets)

    def __len__(self) -> int:
        return self._length

    @property
    def where(self) -> str:
        """The files, for messages."""
        return ", ".join(dataset.where for dataset in self.datasets)

    def sample(self, i: int) -> np.ndarray:
        """int64 [seq_length + 1]: sample i."""
        return self.batch([i])[0]

    def batch(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [n, seq_length + 1]: the samples `indices`. DataExhausted past the end."""
        indices_N = np.asarray(indices, dtype=np.int64)
        if len(indices_N) and not 0 <= indices_N.min() <= indices_N.max() < self._length:
            raise DataExhausted(
                f"{self.name}: sample {indices_N.max()} of {self._length}; the order was built for "
                f"{self.num_samples} samples: raise train_iters (or extend_to)"
            )
        out_NT = np.empty((len(indices_N), self.seq_length + 1), dtype=np.int64)
        choice_N, number_N = self._choice[indices_N], self._number[indices_N]
        for d in np.unique(choice_N):
            rows = np.flatnonzero(choice_N == d)
            out_NT[rows] = self.datasets[d].batch(number_N[rows])
        return out_NT
