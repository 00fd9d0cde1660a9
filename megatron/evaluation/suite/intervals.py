"""Estimate means with intervals. The unit of the statistics is the document, not the token.

Tokens of one document are not independent. The intervals therefore come from a bootstrap over
documents: BCa intervals of `scipy.stats.bootstrap` (Efron 1987). Document d has c_d tokens, and t_d
is the sum of a quantity (such as the loss) over these tokens. The mean is

    value = sum_d t_d / sum_d c_d

With few documents n, bootstrap intervals are too narrow: of 8 documents, they miss the true mean
more than twice as often as they should. So the tail probability a becomes

    Phi(sqrt(n / (n - 1)) t_a)

where t_a is the quantile of Student's t with n - 1 degrees of freedom (the expanded interval of
Hesterberg 2015, arXiv 1411.5279). With many documents, this is a itself.

For k intervals at once, a is divided by k (Bonferroni). So far out, a resample of few documents has
no values. Therefore the distance of both ends from the value is multiplied by t_{a/k} / t_a.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from scipy import stats

from megatron.parallel.loss import perplexity
from megatron.readable_numbers import decimals

RESAMPLES = 2000
LEVEL = 95.0
"""The level of the intervals, in percent."""
BATCH = 1 << 22
"""The bootstrap keeps about this many values in memory at a time. Results do not depend on it."""
FEWEST = 8
"""The least number of documents for an interval. With fewer, bootstrap intervals are false."""
SMALLEST = 0.001
"""An effect of far text that is surely smaller than this, in nats per token, counts as none."""


@dataclass(frozen=True)
class Estimate:
    """A mean, the ends of its 95% interval (NaN without interval), and the number of documents."""

    value: float
    low: float
    high: float
    documents: int

    def effect(self, smallest: float = SMALLEST, *, surely: bool = False) -> str:
        """Return which effect this mean shows, according to its 95% interval.

        The mean is a gain: the amount by which the loss is lower.

            none      the whole interval is in [-smallest, smallest]
            gain      the whole interval is above 0
            loss      the whole interval is below 0
            unclear   otherwise, or without an interval

        Args:
            smallest: The size up to which an effect counts as none.
            surely: Whether the interval of a gain must be above `smallest` instead of 0, and the
                interval of a loss below -`smallest`.
        """
        if -smallest <= self.low <= self.high <= smallest:
            return "none"
        bound = smallest if surely else 0.0
        return "gain" if self.low > bound else "loss" if self.high < -bound else "unclear"

    @property
    def perplexity(self) -> Estimate:
        """The perplexity of this mean loss, with the perplexities of the interval's ends."""
        ends = (perplexity(self.low), perplexity(self.high))
        return Estimate(perplexity(self.value), *ends, self.documents)

    def __str__(self) -> str:
        largest = max(abs(each) for each in (self.value, self.low, self.high))
        shown = min(6, max(4, decimals(largest, 2)))
        if math.isnan(self.low):
            return f"{self.value:.{shown}f} (too few documents for an interval)"
        return f"{self.value:.{shown}f} [{self.low:.{shown}f}, {self.high:.{shown}f}]"


def estimate(
    totals: np.ndarray, counts: np.ndarray, documents: np.ndarray, *, comparisons: int = 1
) -> Estimate:
    """Estimate the ratio sum(totals) / sum(counts), with its 95% interval.

    The interval comes from a bootstrap over documents. For too few documents, it is NaN.

    Args:
        totals: A total for each sequence, such as a sum of losses, [n].
        counts: The divisor of each total, such as a number of tokens, [n].
        documents: The document to which each sequence belongs, [n].
        comparisons: The number of intervals that together cover the true values with 95%
            probability (Bonferroni).
    """
    # At least `FEWEST` documents are needed. Documents whose counts are all 0 are left out. If all
    # documents (at least two) have the same ratio, the interval is this ratio.
    _, which = np.unique(documents, return_inverse=True)
    total_d, count_d = np.bincount(which, totals), np.bincount(which, counts)
    total_d, count_d = total_d[count_d != 0], count_d[count_d != 0]
    if (n := len(total_d)) == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    value = float(_ratio(total_d, count_d))
    if n > 1 and np.ptp(total_d / count_d) == 0:
        return Estimate(value, value, value, n)
    if n < FEWEST:
        return Estimate(value, np.nan, np.nan, n)
    a = (1 - LEVEL / 100) / 2
    joint, single = stats.t.ppf([a / comparisons, a], n - 1)
    tail = float(stats.norm.cdf(math.sqrt(n / (n - 1)) * single))
    with warnings.catch_warnings(action="ignore"):  # of an interval that BCa cannot give
        found = stats.bootstrap(
            (total_d, count_d), _ratio, paired=True, vectorized=True, n_resamples=RESAMPLES,
            batch=max(1, BATCH // n), confidence_level=1 - 2 * tail, rng=np.random.default_rng(0),
        )  # fmt: skip
    low, high = found.confidence_interval
    if np.isnan(low) or np.isnan(high):
        low, high = np.quantile(found.bootstrap_distribution, (tail, 1 - tail))
    low, high = (value + joint / single * (float(end) - value) for end in (low, high))
    return Estimate(value, low, high, n)


def mean_of(losses_nT: np.ndarray, documents: np.ndarray, *, comparisons: int = 1) -> Estimate:
    """Return the mean of all values, with its 95% interval from a bootstrap over documents.

    Args:
        losses_nT: The values, such as the losses of T tokens in each of n sequences, [n, T].
        documents: The document to which each sequence belongs, [n].
        comparisons: The number of intervals that together cover the true values with 95%
            probability (Bonferroni).
    """
    counts = np.full(len(losses_nT), losses_nT.shape[1])
    return estimate(losses_nT.sum(1), counts, documents, comparisons=comparisons)


def _ratio(totals: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
    return totals.sum(axis) / counts.sum(axis)
