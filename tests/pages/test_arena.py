"""Test the tables of the arena by hand."""

from __future__ import annotations

import importlib
import math

import pandas as pd
import pytest

from tests.helpers.paths import ROOT


@pytest.fixture(name="arena")
def _arena(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "lab")
    return importlib.import_module("arena")


def test_the_arenas_tests_share_one_variance(arena):
    """The errors of a, b are (1, -1) / 2 and (-1, 1) / 2: variance 1 with one degree of freedom.

    With one degree, a t value T has the one-sided p value atan(1 / T) / pi.
    """
    values = pd.DataFrame({1: [3.0, 0.0], 2: [4.0, 3.0]}, index=["a", "b"])
    one = [math.atan(1 / (mean / math.sqrt(1 / 2))) / math.pi for mean in (3.5, 1.5)]
    found = arena.p_values(values)
    assert found["a"] == pytest.approx(2 * one[0]) and found["b"] == pytest.approx(one[1])
    [other] = arena.p_values(values, "b").items()
    assert other == ("a", pytest.approx(2 * math.atan(1 / 2.0) / math.pi))
    assert arena.p_values(values.iloc[:1]).empty and arena.p_values(values, "absent").empty
    missing = values.assign(**{"2": [1.0, math.nan]}).set_axis([1, 2, 3], axis=1)
    assert arena.p_values(missing).empty  # only one method has every seed


def arena_run(method, seed, gain, first=10.0, last=9.0):
    return {
        "method": method, "seed": seed, "perplexity_128": first, "perplexity_512": 9.5,
        "perplexity_2048": last, "documents": 21, "gain": gain, "gain_low": gain - 0.01,
        "gain_high": gain + 0.01, "headroom": 0.2, "share": gain / 0.2, "places": 9,
        "induction": 1024,
    }  # fmt: skip


def test_a_harmed_method_takes_no_part_in_the_arenas_tests(arena):
    """Its gain is below -0.05 nats, or its perplexity rises by more than 5%."""
    rows = [
        arena_run(name, seed, gain + seed / 1000 * (1 + place), last=last)
        for place, (name, gain, last) in enumerate(
            [("kerple_log", 0.02, 9.0), ("alibi", 0.0, 10.4), ("low", -0.07, 9.0),
             ("rises", 0.03, 10.6)]
        )
        for seed in (1, 2, 3)
    ]  # fmt: skip
    runs = pd.DataFrame(rows)
    found = arena.compared(runs).set_index("method")
    assert found.index.tolist() == ["rises", "kerple_log", "alibi", "low"]
    assert found.harmed.to_dict() == {
        "rises": True, "kerple_log": False, "alibi": False, "low": True
    }  # fmt: skip
    assert found.gain["kerple_log"] == pytest.approx(0.022) and set(found.seeds) == {3}
    assert found.share["kerple_log"] == pytest.approx(0.11)
    assert found.change["rises"] == pytest.approx(math.log(1.06))
    assert found.level["alibi"] == pytest.approx(math.log(10))
    fair = runs[runs.method.isin(["kerple_log", "alibi"])]
    alone = arena.p_values(fair.pivot(index="method", columns="seed", values="gain"))
    assert found.gain_p.dropna().to_dict() == pytest.approx(alone.to_dict())
    assert found.gain_differs_p.dropna().index.tolist() == ["alibi"]
    for picture in (arena.gains(runs), arena.by_length(runs)):
        assert picture.axes


def test_rows_of_runs_that_are_measured_earlier_stay_in_order(arena, tmp_path):
    path = tmp_path / "runs.csv"
    columns = ["dose", "embedding", "seed", "value"]
    given = [("700", "a", 1, 0.5), ("1400", "a", 1, 0.25)]
    pd.DataFrame(given, columns=columns).to_csv(path, index=False)
    new = pd.DataFrame(
        [("1400", "b", 2, 1.0), ("700", "b", 2, 2.0), ("700", "b", 1, 3.0), ("700", "a", 1, 9.0)],
        columns=columns,
    )
    found = arena.with_earlier(new, path, ["dose", "embedding"])
    assert found.to_numpy().tolist() == [
        ["700", "a", 1, 9.0], ["700", "b", 1, 3.0], ["700", "b", 2, 2.0],
        ["1400", "a", 1, 0.25], ["1400", "b", 2, 1.0],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has other columns: move it away"):
        arena.with_earlier(new.drop(columns="value"), path, ["dose", "embedding"])
