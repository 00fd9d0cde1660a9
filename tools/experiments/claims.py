"""Test claims over seeds: paired t tests, Holm's correction, and TOST for equality.

A claim compares two sides, A and B, for example two embeddings. For each seed s, the sides have the
values a_s and b_s, and their difference is d_s. D is the expected difference.

For metrics like perplexity, d_s = ln a_s - ln b_s. A is `by` percent above B if D is
m = ln(1 + by / 100). A is `by` percent below B if D is -l = ln(1 - by / 100). For shares of right
answers, d_s = a_s - b_s and l = m = by / 100. The claims about D are:

    below      D < -l        one-sided paired t test
    above      D > m         one-sided paired t test
    within     D < m         one-sided paired t test: A is less than `by` percent above B
    equal      -m < D < m    two one-sided tests (TOST); p is the larger of their p values. Neither
                             side is `by` percent above the other
    differs    D != 0        two-sided paired t test

If all d_s are equal, t is not defined. The sign test then replaces the t tests of `below`, `above`
and `differs`, and `within` and `equal` hold if D does, because equal backends give equal values.

With `relative_to`, each side has a reference. Then d_s is (ln a_s - ln of A's reference) -
(ln b_s - ln of B's reference). For shares, the formula has no logarithms. For example,
`relative_to: {length: 128}` compares how the two sides change from length 128 to longer lengths.

A claim of several parts holds only if all its parts hold, so its p value is the largest p value of
its parts. Holm's correction is over all claims of a grid. The sample size is the number of seeds,
not of sequences, because the sequences of one run are not independent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from tools.experiments.description import BEST, METRICS, Endpoint, sides
from tools.experiments.grid import Grid
from tools.experiments.results import Frame

ROUNDING = 1e-12  # differences that are closer than this are equal


@dataclass(frozen=True)
class Verdict:
    """The verdict on one part of a claim, which compares two sides over seeds.

    Attributes:
        name: The name of the claim.
        claim: The part of the claim in words.
        seeds: The number of seeds for which both sides have values.
        change: The mean difference between the two sides, in percent or percentage points.
        low, high: The ends of the 95% interval of `change`.
        p: The p value of this part.
        holm: The p value of the complete claim, after Holm's correction.
        word: The verdict on the complete claim: `holds`, `not shown`, `contradicted` or
            `not tested`.
        unit: The unit of `change` in a text: `%` or ` points`.
    """

    # A side is for example an embedding. If the values are shares of right answers, the difference
    # is in percentage points. A claim is `contradicted` if a part has a significant effect in the
    # opposite direction.

    name: str
    claim: str
    seeds: int = 0
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    holm: float = math.nan
    word: str = "not tested"
    unit: str = "%"


def verdicts(grid: Grid, results: Frame) -> list[Verdict]:
    """Return a verdict for each part of each claim of the grid.

    A claim with several parts holds only if all its parts hold.

    Args:
        grid: A set of training runs, with the claims about these runs.
        results: The results of the runs.
    """
    # The claims are the grid's `endpoints`, in the file's order.
    parts = [
        (name, part)
        for name, given in grid.about.endpoints.items()
        for part in (given if isinstance(given, list) else [given])
    ]
    found = [_tested(name, part, results) for name, part in parts]
    largest = pd.DataFrame({"name": [v.name for v in found], "p": [v.p for v in found]})
    p = largest.groupby("name")["p"].agg(lambda each: each.max(skipna=False)).dropna()
    corrected = dict(zip(p.index, holm(p.to_list()), strict=True))
    alpha = grid.about.alpha
    refuted = {  # without Holm's correction
        verdict.name
        for verdict, (_, part) in zip(found, parts, strict=True)
        if verdict.p > 1 - alpha and part.claim != "differs"
    }
    return [
        replace(
            each,
            holm=corrected[each.name],
            word="contradicted" if each.name in refuted
            else "holds" if corrected[each.name] < alpha else "not shown",
        )
        if each.name in corrected else each
        for each in found
    ]  # fmt: skip


def p_value(a: np.ndarray, b: np.ndarray, claim: str, margin: float = 0.0) -> float:
    """Return the p value of a claim about paired values.

    Args:
        a: The values of side A, or their logarithms if ratios are compared, [seeds].
        b: The values of side B in the same form, with the seeds in the same order.
        claim: The kind of claim: `below`, `above`, `within`, `equal` or `differs`.
        margin: The margin of the claim, as a difference of values in `a` and `b`. It is not
            negative.
    """
    # The module docstring defines the claims.
    if claim == "equal":
        upper = p_value(a, b, "within", margin)
        return max(upper, p_value(b, a, "within", margin))
    offset, alternative = {
        "below": (-margin, "less"),
        "above": (margin, "greater"),
        "within": (margin, "less"),
        "differs": (0.0, "two-sided"),
    }[claim]
    d = (a - b) - offset
    if np.ptp(d) < ROUNDING:  # without any spread, t is not defined
        if abs(d[0]) < ROUNDING:  # says nothing for either side, as t = 0
            return 1.0 if alternative == "two-sided" else 0.5
        holds = {"less": d[0] < 0, "greater": d[0] > 0, "two-sided": True}[alternative]
        # Shares of few answers often have equal differences by chance, so this is the sign test.
        chance = {"within": 0.0, "differs": 2 * 0.5 ** len(d)}.get(claim, 0.5 ** len(d))
        return chance if holds else 1 - chance
    result: Any = stats.ttest_1samp(d, 0.0, alternative=alternative)
    return float(result.pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Correct p values by Holm's step-down method (Holm 1979). The order stays the same."""
    order = np.argsort(values)
    scaled = np.asarray(values)[order] * np.arange(len(values), 0, -1)
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled)) if len(values) else []
    return corrected.tolist()


def significant(
    results: Frame, rows: str, against: str, metric: str, alpha: float
) -> set[tuple[str, int]]:
    """Return the pairs (row, length) at which `metric` differs significantly from a reference row.

    The test is a two-sided paired t test over seeds, with Holm's correction over all pairs.

    Args:
        results: The results of all runs.
        rows: The name of the setting whose values are the rows.
        against: The reference row. All other rows are compared with it, at the same length.
        metric: The name of the metric.
        alpha: The level of significance.
    """
    # The setting is an axis of the grid.
    chosen = results[results["metric"] == metric]
    lower = METRICS[metric]
    tests = {}
    for (row, length), part in chosen[chosen[rows] != against].groupby([rows, "length"]):
        other = chosen[(chosen[rows] == against) & (chosen["length"] == length)]
        a, b = _paired(_by_seed(part), _by_seed(other), logarithm=lower)
        if len(a) > 1 and np.isfinite(a - b).all():
            tests[row, length] = p_value(a, b, "differs")
    return {key for key, p in zip(tests, holm(list(tests.values())), strict=True) if p < alpha}


def _tested(name: str, endpoint: Endpoint, results: Frame) -> Verdict:
    chosen = results[results["metric"] == endpoint.metric]
    groups = sides(endpoint)
    if endpoint.relative_to:
        groups += tuple(side | endpoint.relative_to for side in groups)
    lower, by = METRICS[endpoint.metric], endpoint.by / 100
    verdict = Verdict(name, endpoint.text or _sentence(endpoint), unit="%" if lower else " points")
    a, b, *start = _paired(*(_side(chosen, each) for each in groups), logarithm=lower)
    if start:
        a, b = a - start[0], b - start[1]
    if len(a) < 2 or not np.isfinite(a - b).all():
        return replace(verdict, seeds=len(a))
    margin = -math.log1p(-by) if endpoint.claim == "below" else math.log1p(by)
    p = p_value(a, b, endpoint.claim, margin if lower else by)
    d = a - b
    spread = stats.sem(d) * stats.t.ppf(0.975, len(d) - 1)
    points = d.mean() + spread * np.array([0, -1, 1])
    with np.errstate(over="ignore"):  # an interval of diverged runs may have no finite end
        change, low, high = (100 * (np.expm1(points) if lower else points)).tolist()
    return replace(verdict, seeds=len(a), change=change, low=low, high=high, p=p)


def _side(results: Frame, names: Mapping[str, str]) -> Frame:
    """Return the values of one side of a claim, indexed by seed.

    Args:
        results: The results of one metric.
        names: Maps columns of `results` to the values that select the rows of this side.
    """
    # The columns are the axes of the grid and `length`.
    for key in names.keys() - {"length"}:
        results = results[results[key] == names[key]]
    length = names.get("length", "")
    if length == BEST and len(results):
        means = results.groupby("length")["value"].mean()
        lower = METRICS[results["metric"].iloc[0]]
        length = str(means.idxmin() if lower else means.idxmax())
    return _by_seed(results[results["length"].astype(str) == length] if length else results)


def _by_seed(results: Frame) -> Frame:
    return results.set_index("seed")["value"].astype(float)


def _paired(*series: Frame, logarithm: bool) -> np.ndarray:
    """Return the values of each series at the seeds that all series contain, [series, seeds].

    If `logarithm` is true, return the logarithms of these values.
    """
    shared = pd.concat(series, axis=1, join="inner").sort_index().to_numpy()
    return (np.log(shared) if logarithm else shared).T


def _sentence(endpoint: Endpoint) -> str:
    one, other = map(_named, sides(endpoint))
    by = f"{endpoint.by:g}" + ("%" if METRICS[endpoint.metric] else " points")
    more = f"more than {by} " if endpoint.by else ""
    said = {
        "below": f"is {more}below {other}",
        "above": f"is {more}above {other}",
        "within": f"is at most {by} above {other}",
        "equal": f"equals {other} within {by}",
        "differs": f"differs from {other}",
    }
    start = _named(endpoint.relative_to)
    start = f" relative to that {'' if start.startswith('at ') else 'of '}{start}" if start else ""
    return f"{endpoint.metric}{start}: {one} {said[endpoint.claim]}"


def _named(side: Mapping[str, str]) -> str:
    length = side.get("length")
    at = {None: [], "best": ["at its best length"]}.get(length, [f"at {length}"])
    return " ".join([value for axis, value in side.items() if axis != "length"] + at)
