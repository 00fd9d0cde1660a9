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


def position_of(d: np.ndarray) -> np.ndarray:
    """Return a position of a query that sees a key at distance d: an early one or a late one."""
    return d + 40 * (d % 50)


@dataclass(frozen=True)
class Entry:
    kind: str
    learnable: bool = False
    columns: tuple[Column, ...] = ()
    bias: Kernel | None = None
    weight: Kernel | None = None
    temperature: Kernel | None = None  # t of one head, from its theta and an array of positions
    cpd: bool = False  # is b conditionally positive definite?
    initial: Callable[[int], np.ndarray] | None = None  # fixed first values [heads, columns]
    limit: Callable[[Sequence[float]], float] | None = None  # b + this number is positive definite


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


def gauss_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    """Compute a exp(-r d^p) - a by series where the two nearly cancel. p = 2 if theta has no p."""
    a, r, p = (*theta, 2.0)[:3]
    x = power(r, p, d)
    series = -x + x**2 / 2 - x**3 / 6 + x**4 / 24 - x**5 / 120 + x**6 / 720
    return a * np.where(x < 0.005, series, np.exp(-x) - 1.0)


def sandwich_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    """Multiply sinusoidal position vectors of 128 dimensions, less the product at d = 0, 64."""
    angle = np.multiply.outer(d, [10000.0 ** -(i / 64) for i in range(64)])
    here = np.concatenate([np.sin(0.0 * angle), np.cos(0.0 * angle)], axis=-1)
    there = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    return theta[0] * ((here * there).sum(-1) - 64)


def sum_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    return log_bias(theta[:2], d) + power_bias(theta[2:4], d) + power_bias(theta[4:], d)


def fire_bias(theta: Sequence[float], d: np.ndarray, i: np.ndarray) -> np.ndarray:
    """Compute FIRE's network of 32 hidden units, unit by unit, with the initial L = 512."""
    c, factor, *units = theta
    u = np.log(c * d + 1.0) / np.log(c * np.maximum(512 * factor, i) + 1.0)
    triples = zip(units[:32], units[32:64], units[64:], strict=True)
    return sum(v * np.maximum(w * u + b, 0.0) for w, b, v in triples) + 0.0 * u


def bam_bias(theta: Sequence[float], d: np.ndarray) -> np.ndarray:
    """Compute the logarithm of a generalized Gaussian around the location 2 sinh(theta_mu)."""
    alpha, beta, mu = theta
    key_before_query = -1.0 * d
    far = np.abs(key_before_query - 2.0 * np.sinh(mu)) + 1e-5
    return -np.exp(alpha + beta * np.log(far))


def slopes_column(heads: int) -> np.ndarray:
    return np.array(alibi_slopes(heads))[:, None]


BIAS_P, BIAS_A = Column("bias_p", 0.01, 2.0, 2.0), Column("bias_a", 0.01, INF, 1.0)
WEI_P, WEI_A = Column("wei_p", 0.01, 2.0, 2.0), Column("wei_a", 0.01, INF, 1.0)
LOG_P = Column("bias_p", 0.01, INF, 2.0)
GAUSS_A, GAUSS_R = Column("gauss_a", 0.01, INF, 1.0), Column("gauss_r", 0.01, INF, 1.0)

ENTRIES: dict[str, Entry] = {
    "log_n": Entry(
        "temperature",
        True,
        (Column("temperature", -INF, INF, None),),
        temperature=lambda theta, i: theta[0] * np.log(i + 1.0),
        initial=lambda heads: np.full((heads, 1), 1.0 / np.log(512.0)),
    ),
    "sink": Entry(
        "sink",
        True,
        (Column("sink", -INF, INF, None),),
        initial=lambda heads: np.zeros((heads, 1)),
    ),
    "forget_gate": Entry("gate"),
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
    "alibi_learned": Entry(
        "distance",
        True,
        (Column("slope", 0.0, INF, None),),
        linear_bias,
        cpd=True,
        initial=slopes_column,
    ),
    "gaussian": Entry(
        "distance", True, (GAUSS_A, GAUSS_R), gauss_bias, cpd=True, limit=lambda theta: theta[0]
    ),
    "gaussian3": Entry(
        "distance",
        True,
        (GAUSS_A, GAUSS_R, Column("gauss_p", 0.01, 2.0, 2.0)),
        gauss_bias,
        cpd=True,
        limit=lambda theta: theta[0],
    ),
    "gaussian_mul": Entry(
        "distance", True, (GAUSS_R,), weight=lambda theta, d: power_weight((2.0, theta[0]), d)
    ),
    "sandwich": Entry(
        "distance",
        False,
        (Column("scale", -INF, INF, None),),
        sandwich_bias,
        cpd=True,
        initial=lambda heads: 1.0 / (np.arange(1, heads + 1) * 8.0 / heads)[:, None],
        limit=lambda theta: 64 * theta[0],
    ),
    "kerple_sum": Entry(
        "distance",
        True,
        (
            *(Column("log_p0", 0.01, INF, 2.0), Column("log_a0", 0.01, INF, 1.0)),
            *(Column("power_q0", 0.01, 2.0, 2.0), Column("power_c0", 0.01, INF, 1.0)),
            *(Column("power_q1", 0.01, 2.0, 2.0), Column("power_c1", 0.01, INF, 1.0)),
        ),
        sum_bias,
        cpd=True,
    ),
    "rpe": Entry(
        "distance",
        True,
        tuple(Column(f"bucket_{i}", -INF, INF, None) for i in range(32)),
        t5_bias,
    ),
    "fire": Entry(
        "distance",
        True,
        (
            *(Column("c", 0.001, INF, None), Column("L_factor", 0.001, INF, None)),
            *(Column(f"{x}{k}", -INF, INF, None) for x in "wbv" for k in range(32)),
        ),
        lambda theta, d: fire_bias(theta, d, position_of(d)),
    ),
    "bam": Entry(
        "distance",
        True,
        tuple(Column(f"theta_{x}", -INF, INF, None) for x in ("alpha", "beta", "mu")),
        bam_bias,
        initial=lambda heads: np.zeros((heads, 3)),
    ),
    "rotary": Entry("rotary"),
    "sinusoidal": Entry("input"),
    "learned": Entry("input", True),
    "none": Entry("none"),
}
