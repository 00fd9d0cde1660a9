"""Test the statistics of tools/experiments against scipy and against published examples."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.tools.experiments.test_report_page import HEAD
from tools.experiments import grid_report
from tools.experiments.claims import holm, p_value, significant, verdicts
from tools.experiments.description import Description, Endpoint
from tools.experiments.grid import Grid

# Student's sleep data (Biometrika 6, 1908): extra hours of sleep of ten patients with two drugs.
# R's t.test(paired = TRUE) gives t = -4.0621, p = 0.002833, interval -2.4598858 to -0.7001142.
FIRST = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
SECOND = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])


def test_students_sleep():
    assert p_value(FIRST, SECOND, "differs") == pytest.approx(0.002833, abs=5e-7)
    assert p_value(FIRST, SECOND, "below") == pytest.approx(0.002833 / 2, abs=5e-7)
    assert p_value(FIRST, SECOND, "above") == pytest.approx(1 - 0.002833 / 2, abs=5e-7)


def test_margins_are_those_of_scipys_paired_test():
    for claim, bound, alternative in (
        ("below", SECOND - 0.5, "less"),
        ("within", SECOND + 0.5, "less"),
        ("above", SECOND + 0.5, "greater"),
    ):
        expected = stats.ttest_rel(FIRST, bound, alternative=alternative).pvalue
        assert p_value(FIRST, SECOND, claim, 0.5) == pytest.approx(expected)


def test_equality_holds_where_the_90_percent_interval_is_within_the_margin():
    """Schuirmann (1987): TOST at 5% is the inclusion of the 90% interval. Here: 1.58 +- 0.713."""
    d = FIRST - SECOND
    half = stats.sem(d) * stats.t.ppf(0.95, 9)
    edge = abs(d.mean()) + half
    assert p_value(FIRST, SECOND, "equal", edge) == pytest.approx(0.05)
    assert p_value(FIRST, SECOND, "equal", edge + 0.01) < 0.05
    assert p_value(FIRST, SECOND, "equal", edge - 0.01) > 0.05
    assert p_value(SECOND, FIRST, "equal", edge) == pytest.approx(0.05)


def test_values_without_any_spread():
    a = np.array([1.0, 2.0, 3.0])
    assert p_value(a, a, "within", 0.01) == p_value(a, a, "equal", 0.01) == 0
    assert p_value(a, a, "below") == p_value(a, a, "above") == 0.5
    assert p_value(a, a, "differs") == 1
    assert p_value(a, a + 0.004, "within", 0.01) == p_value(a, a + 0.004, "equal", 0.01) == 0


def test_equal_differences_are_judged_by_their_signs():
    """Three seeds with 10 more of 100 right: chance gives such signs in 1 of 8 cases."""
    few, more = np.array([0.7, 0.4, 0.97]), np.array([0.6, 0.3, 0.87])
    assert np.ptp(few - more) > 0  # by rounding alone
    assert p_value(few, more, "above") == 1 / 8 and p_value(few, more, "below") == 7 / 8
    assert p_value(more, few, "below") == 1 / 8 and p_value(more, few, "above") == 7 / 8
    assert p_value(few, more, "differs") == 1 / 4
    assert p_value(few[:2], more[:2], "differs") == 1 / 2


def test_holm_on_a_textbook_example():
    """R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm") is 0.03 0.06 0.06 0.02."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def results(**values: dict[int, list[float]]) -> pd.DataFrame:
    """Return results of `embedding={length: [value of each seed]}`."""
    rows = [
        {"embedding": name, "length": length, "seed": seed, "metric": metric, "value": value}
        for name, by_length in values.items()
        for length, by_seed in by_length.items()
        for seed, loss in enumerate(by_seed)
        for metric, value in (("loss", loss), ("perplexity", math.exp(loss)))
    ]
    return pd.DataFrame(rows)


def grid(**endpoints: dict | list[dict]) -> Grid:
    parts = {
        name: [Endpoint(**part) for part in (given if isinstance(given, list) else [given])]
        for name, given in endpoints.items()
    }
    about = Description(
        runs="r", configs=["c"], axes={"embedding": ["log", "alibi"]}, seeds=[0], lengths=[64, 128],
        endpoints=parts,
    )  # fmt: skip
    return Grid(Path("g.yml"), about, {}, Path("r"), ())


RUNS = results(
    log={64: [2.00, 2.10, 1.95], 128: [1.995, 2.097, 1.945]},
    alibi={64: [2.02, 2.13, 1.96], 128: [2.22, 2.31, 2.15]},
)
LOG, ALIBI = {"embedding": "log", "length": 128}, {"embedding": "alibi", "length": 128}


def test_each_kind_of_claim_has_its_verdict():
    found = verdicts(
        grid(
            P1={"claim": "below", "of": LOG, "than": {"embedding": "alibi"}},
            P2={"claim": "above", "of": ALIBI, "than": {"length": 64}, "by": 10},
            P3=[
                {"claim": "above", "of": ALIBI, "than": {"length": "best"}, "by": 2},
                {"claim": "within", "of": LOG, "than": {"length": "best"}, "by": 1},
            ],
            P4={"claim": "equal", "of": LOG, "than": {"length": 64}, "by": 2, "metric": "loss"},
            P5={"claim": "above", "of": LOG, "than": {"embedding": "alibi"}},
            P6={"claim": "above", "of": ALIBI, "than": {"length": 64}, "by": 19},
            P7={"claim": "above", "of": LOG, "than": {}},
        ),
        RUNS,
    )
    words = {(each.name, each.word) for each in found}
    assert words == {
        ("P1", "holds"), ("P2", "holds"), ("P3", "holds"), ("P4", "holds"),
        ("P5", "contradicted"), ("P6", "not shown"), ("P7", "not shown"),
    }  # fmt: skip
    first = found[0]
    differences = [1.995 - 2.22, 2.097 - 2.31, 1.945 - 2.15]
    assert first.seeds == 3 and first.change == pytest.approx(
        100 * math.expm1(np.mean(differences))
    )
    by_scipy = stats.ttest_rel([1.995, 2.097, 1.945], [2.22, 2.31, 2.15], alternative="less")
    assert first.p == pytest.approx(by_scipy.pvalue)
    interval = stats.ttest_rel([1.995, 2.097, 1.945], [2.22, 2.31, 2.15]).confidence_interval()
    expected = [100 * math.expm1(interval.low), 100 * math.expm1(interval.high)]
    assert [first.low, first.high] == pytest.approx(expected)
    third = [each for each in found if each.name == "P3"]
    assert third[0].holm == third[1].holm >= max(each.p for each in third)


def test_only_seeds_of_both_sides_count_and_one_is_too_few():
    claim = {"claim": "below", "of": LOG, "than": {"embedding": "alibi"}}
    lacking = RUNS[~((RUNS["embedding"] == "alibi") & (RUNS["seed"] == 1))]
    assert verdicts(grid(P1=claim), lacking)[0].seeds == 2
    one = RUNS[RUNS["seed"] == 0]
    assert verdicts(grid(P1=claim), one)[0].word == "not tested"
    assert verdicts(grid(P1=claim), RUNS.iloc[:0])[0].word == "not tested"
    diverged = RUNS.assign(value=RUNS["value"].where(RUNS["embedding"] == "log", math.inf))
    [lost] = verdicts(grid(P1=claim), diverged)
    [few] = verdicts(grid(P1=claim), one)
    assert lost.word == few.word == "not tested"
    shown = grid_report.page("md", HEAD, [], [lost, few], [])
    assert "A value is not finite." in shown and "Too few runs have measured it." in shown


def test_shares_of_right_answers_differ_by_points():
    shares = RUNS[RUNS["metric"] == "loss"].assign(metric="exact")
    claim = {"claim": "below", "of": LOG, "than": {"embedding": "alibi"}, "metric": "exact"}
    [found] = verdicts(grid(P1=claim), shares)
    change, _ = grid_report.change_of(found)
    assert change == f"{100 * (1.995 - 2.22 + 2.097 - 2.31 + 1.945 - 2.15) / 3:+.2f} points"
    [ratio] = verdicts(grid(P1=claim | {"metric": "loss"}), RUNS)
    assert grid_report.change_of(ratio)[0].endswith("%")


def test_marks_are_corrected_over_the_table():
    marked = significant(RUNS, "embedding", "log", "perplexity", 0.05)
    assert marked == {("alibi", 128)}  # at 64, p is 0.07
