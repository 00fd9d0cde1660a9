"""Test that the page of the second study (docs/lab/plan_recipe.md) says what its results have."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from megatron import positional
from tests.helpers.paths import ROOT
from tests.pages.figures.held import one_line, rows


def test_the_doses_of_the_second_study():
    page = ROOT / "docs" / "lab" / "plan_recipe.md"
    found = pd.read_csv(ROOT / "docs" / "results" / "recipe_dose" / "verdicts.csv")
    found = found[found.embedding == "kerple_log"]
    shown = rows(page, "Step 2: dose and response", "| steps | gain G")
    for row, dose in zip(shown, found.itertuples(), strict=True):
        assert row["steps"] == f"{dose.dose:,}" and row["gain G, nats"] == f"{dose.gain:+.4f}"
        assert row["share"] == f"{100 * dose.share:.0f}%"
        assert row["perplexity at 2,048 against 128"] == f"{100 * dose.change:.0f}%"
        assert (row["R1"] == "yes", row["R2"] == "yes") == (dose.R1, dose.R2)
        assert dose.seeds == 3 and not dose.passes
    measured = one_line(ROOT / "docs" / "lab" / "measurements.md")
    last, first = found.iloc[-1], found.iloc[0]
    assert f"gains {last.gain:.3f} nats from attention" in measured
    assert f"{100 * last.share:.0f}% of what the pointer finds" in measured
    assert f"it loses {-first.gain:.3f}." in measured


DOSES = pd.read_csv(ROOT / "docs" / "results" / "recipe_dose" / "recipes.csv")


@pytest.mark.parametrize("name", ["alibi", "kerple_power", "rpe"])
def test_the_doses_of_other_embeddings(name):
    doses = DOSES[DOSES.embedding == name].groupby("dose")[["gain", "share", "change"]].mean()
    page, start = ROOT / "docs/lab/plan_recipe.md", f"| steps | gain G of `{name}`"
    for row, dose in zip(rows(page, "Step 2: dose and response", start), doses.itertuples(),
                         strict=True):  # fmt: skip
        told = [f"{dose.Index:,}", f"{dose.gain:+.4f}", f"{dose.share:.0%}", f"{dose.change:.0%}"]
        assert list(row.values()) == told


def apart(dose, one, other):
    """Return the runs of both at a dose, and how the page tells the difference of their gains.

    The t interval of three pairs: 4.3027 standard errors to either side.
    """
    found = DOSES[DOSES.dose == dose].set_index("seed")
    ours, theirs = (found[found.embedding == name] for name in (one, other))
    more = ours.gain - theirs.gain
    assert len(more.dropna()) == 3
    half = 4.3027 * more.std() / 3**0.5
    interval = f"95% interval {more.mean() - half:.4f} to {more.mean() + half:.4f})"
    return ours, theirs, f"by {more.mean():.4f} nats (paired by seed, {interval}"


def test_alibi_and_kerple_power_beside_kerple_log_in_the_second_study():
    text = one_line(ROOT / "docs" / "lab" / "plan_recipe.md")
    log, alibi, told = apart(5600, "kerple_log", "alibi")
    assert f"larger {told}" in text
    power, _, told = apart(1400, "kerple_power", "kerple_log")
    assert f"`kerple_power` gains more {told}" in text and (power.gain_low > 0).all()
    _, power, told = apart(5600, "kerple_log", "kerple_power")
    assert f"the gain is larger with `kerple_log` {told}" in text
    assert sorted(power.induction) == [256, 256, 512] and "256 tokens, with one seed 512" in text
    assert {cell.count("[") - 1 for cell in power["copy"]} == {6, 7} and "from six or seven" in text
    places = [{cell.count("[") - 1 for cell in each["copy"]} for each in (alibi, log)]
    assert places == [{7}, {9}] and "from seven of the nine places, `kerple_log` from all" in text
    assert {*alibi.induction} == {512} and {*log.induction} == {1024}
    assert "up to 512 tokens with `alibi` and 1,024 with `kerple_log`" in text


def test_distant_text_harms_rpe_in_the_second_study():
    text = one_line(ROOT / "docs" / "lab" / "plan_recipe.md")
    runs = DOSES[DOSES.embedding == "rpe"]
    assert len(runs) == 12 and (runs.gain_high < 0).all() and {*runs.verdict} == {"harms"}
    assert "harms `rpe` in each of the twelve runs**: each run's interval is below 0" in text
    by_dose = runs.groupby("dose").gain.mean()
    assert (
        by_dose.is_monotonic_increasing and "In nats, this harm gets smaller with the steps" in text
    )
    _, last, told = apart(5600, "kerple_log", "rpe")
    told = told.replace(")", "; other rate, other machine)")
    assert f"the gain of `kerple_log` is then larger {told}" in text
    assert "from 113 tokens on have the same bias" in text  # the last of T5's 32 buckets
    buckets = positional.load("rpe").bucket(torch.tensor([112, 113, 5000]))
    assert buckets.tolist() == [30, 31, 31]
    assert f"perplexity falls by {-last.change.mean():.0%} with the length" in text
    assert {cell.count("[") - 1 for cell in last["copy"]} == {9} and {*last.induction} == {1024}
    assert "copies from all of the nine places, and repeated random tokens help at" in text


def test_the_screening_of_the_second_study():
    """The page has the mean share of each recipe, and the recipe with the largest is chosen."""
    text = one_line(ROOT / "docs" / "lab" / "plan_recipe.md")
    found = pd.read_csv(ROOT / "docs" / "results" / "recipe_screen" / "recipes.csv")
    shares = found.groupby("recipe", sort=False).share.mean()
    for name, share in shares.items():
        assert f"{share:.3f} ({name})" in text
    first = shares[shares >= 0.9 * shares.max()].index[0]
    assert f"Chosen: {first}." in text
