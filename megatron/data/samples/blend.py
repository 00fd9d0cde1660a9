"""Several corpora blended by weight into one order of samples, as GPT-NeoX blends them.

    choice i = first d with the largest  w_d max(i, 1) - c_d        c_d: times d was chosen before
    sample i = sample c_d of corpus d

in float64, with w normalised to the sum 1. The choice depends on earlier choices only, so the order
is one endless sequence: longer orders begin with the shorter ones. Corpus d is indexed for
ceil(1.005 N w_d) samples with the run's seed, where N is the number of samples asked for. With
`weight_by_num_documents`, the weights follow from alpha and the numbers of documents n_d:

    p_d = n_d / sum n;   q_d = p_d^alpha / sum p^alpha;   w_d = q_d (1 - p_d), normalised

These are GPT-NeoX's rules (`data_utils.py`, `blendable_dataset.py`, `helpers.cpp`), bit for bit,
computed without a compiled helper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron.data.errors import DataError
from megatron.data.samples.interface import Samples, checked_indices

_MAX_CORPORA = 254  # GPT-NeoX's limit: the choice is a byte
_SPARE = 1.005  # index 0.5% more samples per corpus than its weight needs
_LANES = 2048  # stretches of the sequence that are computed side by side
_WARM_UP = 256  # steps before a stretch, in which its guessed counts approach the true ones


def normalized(weights: Sequence[float]) -> list[float]:
    """The weights, scaled to the sum 1.

    Raises:
        DataError: a weight is negative or not finite, or all are 0.
    """
    total = sum(weights)
    if not (weights and math.isfinite(total) and total > 0 and min(weights) >= 0):
        raise DataError(f"weights {list(weights)}: must be >= 0 with a sum above 0")
    return [weight / total for weight in weights]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """Weights w of corpora with these numbers of documents n; see the module docstring."""
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
    """How many samples each corpus is indexed for; `weights` sum to 1."""
    return [int(math.ceil(num_samples * weight * _SPARE)) for weight in weights]


def blend_choices(weights: np.ndarray, size: int) -> np.ndarray:
    """uint8 [size]: the corpus that each sample is taken from; `weights` float64, sum 1.

    Each step needs the counts before it, so the rule is a loop. Long orders are cut into stretches
    that are computed side by side from guessed counts. Wrong guesses correct themselves in a few
    steps, because the rule always chooses the corpus that lacks most samples. If the counts at a
    stretch's start differ from those at the end of the stretch before it, the stretch is computed
    again from the latter. The result is therefore the loop's.

    Raises:
        DataError: there are more corpora than a byte can number.
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
    missing = begin - counts.sum(axis=1)  # what rounding down left out goes to the first corpora
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
    """uint8 [B, length]: `length` steps of the rule from each of B states; updates `counts_BD`."""
    rows = np.arange(len(step_B))
    choices = np.empty((len(step_B), length), np.uint8)
    for t in range(length):
        error_BD = weights * np.maximum(step_B + t, 1.0)[:, None] - counts_BD
        chosen_B = error_BD.argmax(axis=1)  # of equal errors the first, as published
        counts_BD[rows, chosen_B] += 1
        choices[:, t] = chosen_B
    return choices


class BlendedDataset:
    """`Samples` of several corpora: `num_samples`, or `extend_to` if that is more.

    Args:
        build: makes the data set of corpus d: `build(d, num_samples, extend_to)`.
        weights: of the corpora, with any sum above 0.
        name: "train", ..., for messages.
        extend_to: continue the order by the same rule up to here.

    Attributes:
        choices: uint8 [len], the corpus that each sample is taken from.

    Raises:
        DataError: the weights are unusable, or there are too many corpora.
    """

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
        self._number = np.empty(self._length, wide)  # the sample's number in its corpus
        self.datasets = []
        for d, indexed in enumerate(samples_to_index(num_samples, shares)):
            places = np.flatnonzero(self.choices == d)
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

    def batch(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [n, seq_length + 1]: the samples `indices`.

        Raises:
            DataExhausted: there is no such sample.
        """
        indices_N = checked_indices(self, indices, "raise train_iters (or extend_to)")
        out_NT = np.empty((len(indices_N), self.seq_length + 1), dtype=np.int64)
        choice_N, number_N = self.choices[indices_N], self._number[indices_N]
        for d in np.unique(choice_N):
            rows = np.flatnonzero(choice_N == d)
            out_NT[rows] = self.datasets[d].batch(number_N[rows])
        return out_NT
