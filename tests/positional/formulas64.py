"""Implement every positional embedding a second time, from the papers, in float64 numpy.

Nothing here imports `megatron`. The entry of a distance kernel gives b and w of one head, from that
head's theta (a sequence of floats) and an array of distances. `test_contract.py` checks every entry
and fails for an embedding without an entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Kernel = Callable[[Sequence[float], np.ndarray], np.ndarray]
INF = math.inf


@dataclass(frozen=True)
class Column:
    """A column of theta: name, bounds, and the range [0, top) of its uniform initial values."""

    name: str
    low: float
    high: float
    top: float | None  # None: not drawn uniformly, see the entry's `initial`


@dataclass(frozen=True)
class Entry:
    kind: str
    learnable: bool = False
    columns: tuple[Column, ...] = ()
    bias: Kernel | None = None
    weight: Kernel | None = None
    cpd: bool = False  # is b conditionally positive definite?
    initial: Callable[[int], np.ndarray] | None = None  # fixed first values [heads, columns]


def power(a: float, p: float, d: np.ndarray) -> np.ndarray:
    return a * np.where(d == 0, 0.0, np.exp(p * np.log(np.where(d == 0, 1.0, d))))


def log_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    p, a = theta
    return -p * np.log1p(a * d)


def log3_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    p, a, r = theta
    return -p * np.log1p(power(a, r, d))


def power_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    return -power(theta[1], theta[0], d)


def power_weight(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    return np.exp(-power(theta[1], theta[0], d))


def linear_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    return -theta[0] * d


def t5_bucket(d: int) -> int:
    if d < 16:
        return d
    return min(31, 16 + math.floor(math.log(d / 16) / math.log(128 / 16) * 16))


def t5_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    return np.array([theta[t5_bucket(int(x))] for x in d])


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes by its published recursion to neighbouring powers of two."""
    if math.log2(heads).is_integer():
        ratio = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [ratio ** (i + 1) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def slopes_column(heads: int) -> np.ndarray:
    return np.array(alibi_slopes(heads))[:, None]


BIAS_P, BIAS_A = Column("bias_p", 0.01, 2.0, 2.0), Column("bias_a", 0.01, INF, 1.0)
WEI_P, WEI_A = Column("wei_p", 0.01, 2.0, 2.0), Column("wei_a", 0.01, INF, 1.0)
LOG_P = Column("bias_p", 0.01, INF, 2.0)

ENTRIES: dict[str, Entry] = {
    "kerple_log": Entry("distance", True, (LOG_P, BIAS_A), log_bias, cpd=True),
    "kerple_log3": Entry(
        "distance", True, (LOG_P, BIAS_A, Column("bias_r", 0.01, 2.0, 2.0)), log3_bias, cpd=True
    ),
    "kerple_power": Entry("distance", True, (BIAS_P, BIAS_A), power_bias, cpd=True),
    "kerple_power_mul": Entry("distance", True, (WEI_P, WEI_A), weight=power_weight),
    "kerple_power_add_mul": Entry(
        "distance",
        True,
        (BIAS_P, BIAS_A, WEI_P, WEI_A),
        lambda theta, d: power_bias(theta[:2], d),
        lambda theta, d: power_weight(theta[2:], d),
        cpd=True,
    ),
    "kerple_power_original": Entry(
        "distance",
        False,
        (Column("bias_a", 0.01, INF, None),),
        linear_bias,
        cpd=True,
        initial=lambda heads: np.maximum(slopes_column(heads), 0.01),
    ),
    "alibi": Entry(
        "distance",
        False,
        (Column("slope", -INF, INF, None),),
        linear_bias,
        cpd=True,
        initial=slopes_column,
    ),
    "rpe": Entry(
        "distance",
        True,
        tuple(Column(f"bucket_{i}", -INF, INF, None) for i in range(32)),
        t5_bias,
    ),
    "rotary": Entry("rotary"),
    "sinusoidal": Entry("input"),
    "learned": Entry("input", True),
    "none": Entry("none"),
}
