"""Margins, best lengths, pairs of seeds and sentences of claims, counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.tools.experiments.test_experiment_statistics import grid
from tools.experiments import grid_report
from tools.experiments.claims import p_value, significant, verdicts
from tools.experiments.moved_theta import VALUES
from tools.experiments.results import of_run


def table(metric, **values):
    """Return results of `name={length: [value of each seed]}`."""
    return pd.DataFrame(
        [
            {"embedding": name, "length": length, "seed": seed, "metric": metric, "value": value}
            for name, by_length in values.items()
            for length, by_seed in by_length.items()
            for seed, value in enumerate(by_seed)
        ]
    )


def side(name, length=64):
    return {"embedding": name, "length": length}


def one(results, **claim):
    [found] = verdicts(grid(P=claim), results)
    return found


@pytest.mark.parametrize(
    ("claim", "by", "factor"), [("below", 20, 0.8), ("above", 25, 1.25), ("within", 25, 1.25)]
)
def test_percents_are_of_the_other_side(claim, by, factor):
    """Without any spread, a permille beyond the margin decides, by the signs of three seeds."""
    other = np.array([4.0, 5.0, 8.0])
    for more in (0.999, 1.001):
        against = (more < 1) == (claim == "above")
        expected = float(against) if claim == "within" else (7 if against else 1) / 8
        results = table("perplexity", a={64: factor * more * other}, b={64: other})
        found = one(results, claim=claim, of=side("a"), than=side("b"), by=by)
        assert found.p == pytest.approx(expected, abs=1e-6)
        assert found.change == pytest.approx(100 * (factor * more - 1))


def test_a_change_from_a_reference_on_is_compared_by_seed():
    """A falls by 20% and B by 36% from length 32 on, so A ends 25% above B, from any level."""
    a, b = np.array([4.0, 5.0, 8.0]), np.array([9.0, 1.0, 2.0])
    results = table("perplexity", a={32: a, 64: 0.8 * a}, b={32: b, 64: 0.64 * b})
    from_32 = {"of": side("a"), "than": side("b"), "relative_to": {"length": 32}}
    for by, p in ((24.9, 1 / 8), (25.1, 7 / 8)):
        found = one(results, claim="above", by=by, **from_32)
        assert found.change == pytest.approx(25) and found.p == pytest.approx(p, abs=1e-6)
    assert one(results, claim="differs", of=side("a"), than=side("b")).p > 0.05
    said = "perplexity relative to that at 32: a at 64 is above b at 64"
    assert one(results, claim="above", **from_32).claim == said
    shares = table("exact", a={32: a / 10, 64: a / 10 + 0.1}, b={32: b / 10, 64: b / 10})
    assert one(shares, claim="above", metric="exact", **from_32).change == pytest.approx(10)


def test_a_seed_without_its_reference_does_not_count():
    values = {32: [2.0, 2.0], 64: [1.0, 1.1, 9.0]}
    results = table("perplexity", a=values, b={32: [2.0, 2.0, 2.0], 64: [2.0, 2.1, 2.2]})
    claim = {"claim": "below", "of": side("a"), "than": side("b")}
    assert one(results, **claim).seeds == 3
    assert one(results, **claim, relative_to={"length": 32}).seeds == 2


@pytest.mark.parametrize("claim", ["below", "above"])
def test_shares_of_right_answers_differ_by_points(claim):
    sign = -1 if claim == "below" else 1
    other = np.array([0.5, 0.6, 0.8])
    for more, p in ((0.11, 1 / 8), (0.09, 7 / 8)):
        results = table("exact", a={64: other + sign * more}, b={64: other})
        found = one(results, claim=claim, of=side("a"), than=side("b"), by=10, metric="exact")
        assert found.change == pytest.approx(100 * sign * more)
        assert found.p == pytest.approx(p)


def test_the_interval_is_students():
    a, b = np.array([2.0, 2.5, 2.25, 2.0]), np.array([1.0, 1.75, 1.0, 1.25])
    results = table("exact", a={64: a / 10}, b={64: b / 10})
    found = one(results, claim="differs", of=side("a"), than=side("b"), metric="exact")
    d = (a - b) / 10
    half = d.std(ddof=1) / math.sqrt(4) * 3.182446  # t(0.975) with 3 degrees of freedom
    assert (found.low, found.high) == pytest.approx(
        (100 * (d.mean() - half), 100 * (d.mean() + half)), rel=1e-6
    )
    assert found.seeds == 4 and found.p == pytest.approx(stats.ttest_rel(a, b).pvalue)


@pytest.mark.parametrize(("metric", "value"), [("perplexity", 2.0), ("exact", 0.5)])
def test_the_best_length_has_the_lowest_perplexity_or_the_most_right_answers(metric, value):
    worse = 4.0 if metric == "perplexity" else 0.25
    a = {64: [worse, worse], 128: [value, value]}
    results = table(metric, a=a, b={64: [1.0, 1.0], 128: [1.0, 1.0]})
    found = one(results, claim="differs", of=side("b"), than=side("a", "best"), metric=metric)
    change = 100 * (1 / value - 1) if metric == "perplexity" else 100 * (1 - value)
    assert found.change == pytest.approx(change)


def test_a_claim_of_parts_is_as_weak_as_its_weakest_part():
    base = np.array([4.0, 5.0, 8.0])
    noise = np.array([1.00, 1.02, 0.99])
    results = table(
        "perplexity", a={64: 0.5 * base * noise, 128: 0.99 * base * noise}, b={64: base, 128: base}
    )
    parts = [{"claim": "below", "of": side("a", n), "than": {"embedding": "b"}} for n in (64, 128)]
    strong, weak = verdicts(grid(P=parts), results)
    assert strong.p < 0.01 < 0.05 < weak.p
    assert strong.holm == weak.holm == weak.p and strong.word == weak.word == "not shown"
    alone = verdicts(grid(P=parts[0], Q=parts[1]), results)
    assert alone[0].holm == pytest.approx(2 * strong.p) and alone[0].word == "holds"
    lacking = results[results["length"] == 64]
    tested, untested = verdicts(grid(P=parts), lacking)
    assert tested.word == untested.word == "not tested"
    page = grid_report.page("md", {"title": "T"}, [], [tested, untested], [])
    first, second = page.splitlines()[-2:]
    assert first.endswith("(not corrected: another part of the claim was not tested)")
    assert second.endswith(". Too few runs have measured it.")


def test_an_interval_of_diverged_runs_may_have_no_finite_end():
    results = table("perplexity", a={64: [1e300, 1e305, 1e308]}, b={64: [9.0, 10.0, 11.0]})
    found = one(results, claim="above", of=side("a"), than=side("b"))
    change = 100 * (math.exp(np.log([1e300 / 9, 1e304, 1e308 / 11]).mean()) - 1)
    assert found.change == pytest.approx(change) and found.high == math.inf
    assert grid_report.change_of(found)[1].endswith(" to +inf")
    results = table("perplexity", a={64: [1e9, 1e9]}, b={64: [10.0, 10.0]})
    large = grid_report.change_of(one(results, claim="above", of=side("a"), than=side("b")))
    assert large == ("+1e+10%", "+1e+10 to +1e+10")


def test_differs_is_never_contradicted():
    base = np.array([4.0, 5.0, 8.0])
    results = table("perplexity", a={64: base}, b={64: base})
    assert one(results, claim="differs", of=side("a"), than=side("b")).word == "not shown"


def test_values_without_spread_are_on_one_side():
    a = np.array([1.0, 2.0, 3.0])
    kinds = ("below", "above", "differs")
    assert [p_value(a + 1, a, claim) for claim in kinds] == [7 / 8, 1 / 8, 1 / 4]
    assert [p_value(a - 1, a, claim) for claim in kinds] == [1 / 8, 7 / 8, 1 / 4]
    assert p_value(a, a, "below", 0.5) == p_value(a, a, "above", 0.5) == 7 / 8


def test_marks_need_two_seeds_and_finite_values():
    base = [4.0, 5.0, 8.0]
    rows = {"a": {64: base, 128: base}, "b": {64: [8.0, 10.01, 16.0], 128: base}}
    results = table("perplexity", **rows)
    assert significant(results, "embedding", "a", "perplexity", 0.05) == {("b", 64)}
    single = results[results["seed"] == 0]
    assert significant(single, "embedding", "a", "perplexity", 0.05) == set()
    pair = results[results["seed"] < 2]
    assert significant(pair, "embedding", "a", "perplexity", 0.05) == {("b", 64)}
    good = (results["seed"] > 0) | (results["embedding"] == "a")
    broken = results.assign(value=results["value"].where(good, math.inf))
    assert significant(broken, "embedding", "a", "perplexity", 0.05) == set()
    certain = table("perplexity", a={64: [1.0, 1.0]}, b={64: [2.0, 2.01]})  # ln 1 = 0
    assert significant(certain, "embedding", "a", "perplexity", 0.05) == {("b", 64)}
    apart = (results["seed"] == 0) == (results["embedding"] == "a")  # no seed in common
    assert significant(results[apart], "embedding", "a", "perplexity", 0.05) == set()
    both = pd.concat([results, results.assign(metric="loss", value=1.0)])
    assert significant(both, "embedding", "a", "perplexity", 0.05) == {("b", 64)}


def test_a_run_whose_loss_is_not_a_number_is_not_left_out(tmp_path):
    """Without it, the others of its row would look like the mean of all seeds."""
    (tmp_path / "extrapolation.csv").write_text("length,loss,perplexity\n64,2,7.4\n128,nan,nan\n")
    found, _ = of_run(tmp_path)
    ends = found.set_index(["length", "metric"])["value"]
    assert ends[64, "loss"] == 2.0 and ends[128, "loss"] == ends[128, "perplexity"] == math.inf
    results = table("perplexity", a={128: [11.0, 12.0, math.inf]}, b={128: [11.0, 12.0, 13.0]})
    moved = pd.DataFrame(columns=["embedding", "parameter", "seed", "folder", *VALUES])
    results = results.assign(folder="none")
    [part] = grid_report.sections(results, moved, "embedding", "perplexity", None, False, "x")
    assert part.table["128"].tolist() == ["inf", "12.00 ± 1.00"]


@pytest.mark.parametrize(
    ("claim", "by", "sentence"),
    [
        ("below", 0, "perplexity: a at 64 is below b at its best length"),
        ("below", 2.5, "perplexity: a at 64 is more than 2.5% below b at its best length"),
        ("above", 5, "perplexity: a at 64 is more than 5% above b at its best length"),
        ("within", 1, "perplexity: a at 64 is at most 1% above b at its best length"),
        ("equal", 3, "perplexity: a at 64 equals b at its best length within 3%"),
        ("differs", 0, "perplexity: a at 64 differs from b at its best length"),
    ],
)
def test_sentences(claim, by, sentence):
    results = table("perplexity", a={64: [1.0, 2.0]}, b={64: [1.0, 3.0]})
    found = one(results, claim=claim, of=side("a"), than=side("b", "best"), by=by)
    assert found.claim == sentence and found.name == "P"
