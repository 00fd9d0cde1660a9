"""Test that the pages about retrofits have the results of the study, docs/results/retrofit."""

from __future__ import annotations

import ast

import numpy as np
import pandas as pd

from tests.helpers.paths import ROOT
from tests.pages.figures.held import LAB, RESULTS, assert_rounded, grid, rows, says

RUNS = pd.read_csv(RESULTS / "retrofit" / "retrofit.csv")
RUNS["places"] = RUNS["copy"].map(lambda places: len(ast.literal_eval(places)))
MEANS = RUNS.groupby("method").mean(numeric_only=True).sort_values("perplexity_2048")
VERDICTS = pd.read_csv(RESULTS / "retrofit" / "verdicts.csv")
DIFFERENCES = pd.read_csv(RESULTS / "retrofit" / "differences.csv").set_index(["method", "than"])
LENGTHS = {length: f"perplexity_{length}" for length in grid("retrofit").about.lengths}
LABELS = {
    "rotary, unchanged": "more",
    "rotary, window of 128": "window",
    "rotary, interpolated": "linear",
    "rotary, NTK": "ntk",
    "rotary, YaRN": "yarn",
    "rotary + kerple_log": "rotary_kerple_log",
    "kerple_log, fitted": "kerple_log_fit",
}
"""The names on the page for users. Other methods have the name of their embedding."""


def ratios(method: str, length: int) -> pd.Series:
    """Return each seed's perplexity, divided by that of "window"."""
    values = RUNS.set_index(["method", "seed"])[LENGTHS[length]]
    return values[method] / values["window"]


def above(method: str, length: int) -> str:
    """Return by how many percent the perplexity is above that of "window"."""
    return f"{100 * np.exp(np.log(ratios(method, length)).mean()) - 100:.0f}%"


def test_every_run_of_the_plan_was_measured():
    study = grid("retrofit")
    methods = {cell.axes["method"] for cell in study.cells}
    for seed in {cell.seed for cell in study.cells}:
        assert {*RUNS.method[RUNS.seed == seed]} == {*methods, "window"}
    assert not RUNS.duplicated(["method", "seed"]).any()
    sources = len(grid("retrofit_base").cells)
    counted = f"all {sources} sources, {len(study.cells)} retrofits and {len(RUNS)} reports"
    says("lab/plan_retrofit", counted)


def test_the_table_for_users():
    table = rows(ROOT / "docs" / "retrofit.md", "Does it pay\\?")
    found = [row["positions"].replace("`", "") for row in table]
    assert [LABELS.get(each, each) for each in found] == [*MEANS.index]
    for row, means in zip(table, MEANS.itertuples(), strict=True):
        assert_rounded(row["at 128"], means.perplexity_128)
        assert_rounded(row["at 2,048"], means.perplexity_2048)
        assert row["gain"] == f"{means.gain:+.3f}"


def test_the_table_of_the_lab():
    table = rows(LAB / "plan_retrofit.md", "Results")
    assert [row["method"] for row in table] == [*MEANS.index]
    for row in table:
        means, runs = MEANS.loc[row["method"]], RUNS[RUNS.method == row["method"]]
        for length, column in LENGTHS.items():
            assert row[f"{length:,}"] == f"{means[column]:.2f}"
        assert row["gain"] == f"{means.gain:+.3f}" and row["places"] == f"{means.places:.1f}"
        assert row["induction"] == ", ".join(map(str, runs.induction))


def test_what_the_page_for_users_says():
    assert len(VERDICTS) == 2 and not VERDICTS.holds.any()
    assert MEANS.gain["rotary_kerple_log"] < 0 and MEANS.index[0] == "window"
    trained, more = (int(grid(name).variables["steps"]) for name in ("retrofit_base", "retrofit"))
    yarn, ntk, both = (f"{MEANS.places[x]:.1f}" for x in ("yarn", "ntk", "rotary_kerple_log"))
    says(
        "retrofit",
        f"{trained:,} steps at 128 tokens) got other positions and {more} more steps.",
        "`rotary + kerple_log` failed both planned tests",
        f"YaRN copies random tokens from {yarn} of nine places, NTK from {ntk}, "
        f"`rotary + kerple_log` from {both}.",
    )


def test_the_verdicts():
    gain, below = VERDICTS.itertuples()
    assert gain.p == 1 and (RUNS.gain_high[RUNS.method == "rotary_kerple_log"] < 0).all()
    against = DIFFERENCES.loc["rotary_kerple_log", "window"]
    times, low, high = np.exp(against[["ppl", "ppl_low", "ppl_high"]].astype(float) / 100)
    assert below.mean == against.ppl
    says(
        "lab/plan_retrofit",
        f"The gain of `rotary_kerple_log` is {gain.mean:.3f} nats on average, and below 0 with "
        f"each seed (p = {gain.p:.0f}).",
        f'tokens is {times:.2f} times that of "window" (95% interval {low:.2f} to {high:.2f}, '
        f"p = {below.p:.2f}).",
    )


def test_what_was_explored():
    others = MEANS.index.drop("window")
    assert all((ratios(name, length) > 1).all() for name in others for length in (1024, 2048))
    assert all((ratios("ntk", length) < 1).all() for length in (256, 512))
    fitted = DIFFERENCES.loc["kerple_log_fit", "window"]
    gains = DIFFERENCES.xs("window", level="than").gain_low
    assert [*gains.index[gains > 0]] == ["kerple_log_fit"]
    yarn, alibi = (RUNS[RUNS.method == name] for name in ("yarn", "alibi"))
    (induction,) = {*yarn.induction}
    assert {*yarn.places} == {9}
    worst, *rest = alibi.sort_values("perplexity_128", ascending=False).itertuples()
    first = MEANS.perplexity_128
    says(
        "lab/plan_retrofit",
        f"(+{MEANS.gain['kerple_log_fit']:.3f} nats, 95% interval {fitted.gain_low:.3f} to "
        f"{fitted.gain_high:.3f}), but its perplexity is {above('kerple_log_fit', 2048)} above "
        'that of "window" at 2,048, '
        f"and {above('kerple_log_fit', 128)} above at 128.",
        f"over {induction:,} tokens, at a perplexity {above('yarn', 2048)} above that of",
        f"ends at {first['kerple_log']:.2f} at 128 tokens, fitted at "
        f"{first['kerple_log_fit']:.2f}, and both are far above the {first['more']:.2f} of more "
        "training.",
        f"One run of `alibi` (seed {worst.seed}) ended at {worst.perplexity_128:.1f} at 128 "
        f"tokens, the others at {rest[1].perplexity_128:.1f} and {rest[0].perplexity_128:.1f}.",
    )
