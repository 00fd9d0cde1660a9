"""Test the tables of the lab's scripts by hand: seconds per step, and the study of recipes."""

from __future__ import annotations

import importlib.util
import json
import math
from types import SimpleNamespace

import pandas as pd
import pytest

from megatron.files import write_text
from megatron.run_folder import RunFolder
from tests.helpers.paths import GRIDS, ROOT
from tools.experiments.grid import read_grid

GRID = next(path for path in GRIDS if path.name == "seconds_per_step.yml")


def script(name):
    """Return a script of docs/lab as a module; docs/lab is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "lab" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_report(folder, measures):
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"measures": measures}))


def test_the_seconds_are_the_median_after_the_warm_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for cell in read_grid(GRID).cells:
        name, seconds = cell.axes["embedding"], [9.0, 9.0, 0.4, 0.2, 0.3]
        if name == "rpe":
            seconds = [9.0, 9.0, 0.5, 0.7, 0.6]
        if name == "rotary":
            seconds = [9.0]
        rows = [
            {"step": 10 * (n + 1), "train/seconds_per_step": each} for n, each in enumerate(seconds)
        ]
        cell.folder.mkdir(parents=True)
        lines = "\n".join(json.dumps(row) for row in [{"step": 30, "final/loss": 1.0}, *rows])
        write_text(RunFolder(cell.folder).metrics, lines + "\n")
    assert script("seconds_per_step").main([str(GRID), "--out", "out"]) == 0
    table = pd.read_csv("out/seconds_per_step.csv", index_col="embedding")
    assert "rotary" not in table.index and len(table) == 9
    assert table.seconds["kerple_log"] == 0.3 and table.seconds["rpe"] == 0.6
    assert table.ratio["rpe"] == 2 and table.paper_ratio["rpe"] == pytest.approx(1.107, abs=1e-3)
    assert "rotary has no step after step 20" in capsys.readouterr().err


def test_without_the_reference_there_are_no_ratios(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert script("seconds_per_step").main([str(GRID), "--out", "out"]) == 1
    assert "kerple_log, to which the ratios refer, was not measured" in capsys.readouterr().err


def test_a_row_of_the_study_is_what_the_plan_defines(tmp_path):
    """Gain 0.02 of a headroom of 0.05 is a share of 40%; 9 / 10 - 1 is a change of -10%."""
    recipe = script("recipe")
    pointer = {
        "documents": 30, "taken": 0.02, "taken_low": 0.01, "taken_high": 0.03, "value": 0.05,
        "low": 0.04, "high": 0.06, "alone": 0.08, "share_low": 0.2, "share_high": 0.6,
    }  # fmt: skip
    measures = {
        "pointer": {"rows": [pointer]},
        "by_length": {"rows": [{"length": 128, "value": 10.0}, {"length": 2048, "value": 9.0}]},
        "copy": {"answer": "a"}, "induction": {"answer": "b"}, "windowed_twin": {"answer": "helps"},
    }  # fmt: skip
    cell = SimpleNamespace(
        folder=tmp_path, axes={"recipe": "short"}, seed=7,
        config=lambda: SimpleNamespace(model=SimpleNamespace(seq_length=128)),
    )  # fmt: skip
    folder = RunFolder(tmp_path).suite
    write_report(folder, measures)
    recipe.measure(cell, folder)  # has a report, so it is not measured again
    found = recipe.row(cell)
    assert (found["recipe"], found["seed"], found["W"]) == ("short", 7, 128)
    assert found["share"] == pytest.approx(0.4) and found["change"] == pytest.approx(-0.1)
    assert (found["gain"], found["headroom"], found["headroom_alone"]) == (0.02, 0.05, 0.08)
    table = pd.DataFrame([found, found | {"share_low": None, "share_high": None}])
    with_interval, without = recipe.shares(table)
    assert with_interval == ("short, seed 7", pytest.approx(0.4), 0.2, 0.6)
    assert without == ("short, seed 7", *[pytest.approx(0.4)] * 3)


def test_the_plans_criteria_by_hand():
    """Gains 1, 2, 3 have t = 2 / (1 / sqrt(3)) = 3.46, one-sided p = 0.037 with two degrees."""
    rows = [
        {"dose": dose, "embedding": "kerple_log", "gain": gain, "gain_low": low, "share": share,
         "headroom_low": 0.1, "change": -0.1}
        for dose, gains, low, share in (
            ("700", (1.0, 2.0, 3.0), 0.1, 0.5),
            ("1400", (2.0, 2.1, 2.2), 0.1, 0.29),
            ("2800", (2.0, 2.1, 2.2), -0.1, 0.5),
            ("5600", (2.0, 2.1, 2.2), 0.1, 0.3),
        )
        for gain in gains
    ]  # fmt: skip
    found = script("recipe").decide(pd.DataFrame(rows)).set_index("dose")
    assert found.p["700"] == pytest.approx(0.0371, abs=1e-4)
    assert found.R1.tolist() == [False, True, False, True]
    assert found.R2.tolist() == [True, False, True, True]
    assert found.passes.tolist() == [False, False, False, True] and set(found.seeds) == {3}


def test_a_retrofit_is_compared_with_more_training_and_with_a_window(tmp_path):
    """ln 1.1 and ln 1.2: mean 13.8, deviation 6.15, t = 12.7 with one degree of freedom."""
    retrofit = script("retrofit")
    rows = []
    for seed, (more, window, new) in {1: (10.0, 10.0, 11.0), 2: (20.0, 25.0, 24.0)}.items():
        for method, value, gain in (("more", more, 0.0), ("window", window, 0.0), ("x", new, 0.1)):
            rows.append(
                {"method": method, "seed": seed, "perplexity_128": 1.0, "perplexity_2048": value,
                 "gain": gain + seed / 100, "gain_low": 0.0}
            )  # fmt: skip
    found = pd.DataFrame(retrofit.differences(pd.DataFrame(rows))).set_index(["method", "than"])
    assert set(found.index) == {
        ("more", "window"),
        ("window", "more"),
        ("x", "more"),
        ("x", "window"),
    }
    one = found.loc[("x", "more")]
    logs = 100 * math.log(1.1), 100 * math.log(1.2)
    assert one.ppl == pytest.approx(sum(logs) / 2) and one.seeds == 2
    half = 12.7062 * (logs[1] - logs[0]) / 2
    assert (one.ppl_low, one.ppl_high) == pytest.approx((one.ppl - half, one.ppl + half), rel=1e-4)
    assert one.gain == pytest.approx(0.1)
    # a t value T has the one-sided p value atan(1 / T) / pi with one degree of freedom
    t_value = (sum(logs) / 2) / ((logs[1] - logs[0]) / 2)
    assert one.ppl_p == pytest.approx(1 - math.atan(1 / t_value) / math.pi, rel=1e-6)
    assert retrofit.interval(pd.Series([3.0]))[0] == 3.0


def retrofit_table(gains, lows, perplexities, window):
    """Return the table of a study with three seeds, of the primary method and `window` alone."""
    rows = []
    columns = zip(gains, lows, perplexities, window, strict=True)
    for seed, (gain, low, perplexity, other) in enumerate(columns):
        shared = {"seed": seed, "perplexity_128": 10.0}
        new = {"perplexity_2048": perplexity, "gain": gain, "gain_low": low}
        rows.append({"method": "rotary_kerple_log", **shared, **new, "gain_high": gain + 1})
        old = {"perplexity_2048": other, "gain": 0.0, "gain_low": 0.0}
        rows.append({"method": "window", **shared, **old, "gain_high": 0.0})
    return pd.DataFrame(rows[::2] + rows[:0:-2])  # the seeds of `window` in another order


def test_the_primary_tests_of_the_retrofits_by_hand():
    """With two degrees of freedom, p is 1/2 - t / (2 sqrt(t^2 + 2)); gains 1, 2, 3 have t^2 = 12.

    The differences of ln 10 times -3, -4, -5 have t = -4 sqrt(3), so t^2 = 48.
    """
    retrofit = script("retrofit")
    p_gain, p_below = (1 / 2 - t / (2 * math.sqrt(t**2 + 2)) for t in (12**0.5, 48**0.5))
    assert p_gain == pytest.approx(0.0371, abs=1e-4) and p_below == pytest.approx(0.0101, abs=1e-4)
    gains, lows, window = (1.0, 2.0, 3.0), (0.1, 0.2, 0.3), (1.0, 100.0, 10.0)
    below = (1e-3, 1e-2, 1e-4)
    found = retrofit.decide(retrofit_table(gains, lows, below, window))
    assert found.p.tolist() == pytest.approx([p_gain, p_below])
    assert found.holm.tolist() == pytest.approx([max(p_gain, 2 * p_below), 2 * p_below])
    assert found["mean"].tolist() == pytest.approx([2.0, -400 * math.log(10)])
    assert found.holds.tolist() == [True, True]

    # One interval of three has 0 in it: the first test has the p value 1.
    one_wide = retrofit.decide(retrofit_table(gains, (0.1, -0.1, 0.3), below, window))
    assert one_wide.p[0] == 1 and one_wide.holds.tolist() == [False, True]
    # Then the second test needs half of 5%, which t = -sqrt(12) does not reach.
    weaker = (1e-1, 1e0, 1e-2)
    found = retrofit.decide(retrofit_table(gains, (0.1, -0.1, 0.3), weaker, window))
    assert found.p[1] == pytest.approx(p_gain) and not found.holds.any()
    found = retrofit.decide(retrofit_table(gains, lows, weaker, window))
    assert found.holm.tolist() == pytest.approx([2 * p_gain] * 2) and not found.holds.any()
    above = retrofit.decide(retrofit_table(gains, lows, (1e3, 1e6, 1e6), window))
    assert above.p[1] > 0.9 and not above.holds.any()
    two = retrofit.decide(retrofit_table((1.0, 1.01), lows[:2], (1e-3, 1.01e-3), (1.0, 1.0)))
    assert (two.holm < 0.05).all() and not two.holds.any()


def test_the_pictures_of_the_retrofits_show_every_method():
    retrofit = script("retrofit")
    table = retrofit_table((1.0, 2.0, 3.0), (0.1, 0.2, 3.1), (2.0, 3.0, 4.0), (5.0, 6.0, 7.0))
    (axes,) = retrofit.gains(table).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rotary_kerple_log", "window"]
    assert len(axes.containers) == 6
    (axes,) = retrofit.by_length(table, "title").axes
    assert [line.get_ydata().tolist() for line in axes.lines[:2]] == [[10, 3], [10, 6]]


def test_the_rows_of_earlier_seeds_stay(tmp_path):
    retrofit, path = script("retrofit"), tmp_path / "retrofit.csv"
    table = retrofit_table((1.0, 2.0, 3.0), (0.1, 0.2, 0.3), (2.0, 3.0, 4.0), (5.0, 6.0, 7.0))
    assert len(retrofit.with_earlier(table[:4], path, ["method"])) == 4
    table.assign(gain=9.0)[::-1].to_csv(path, index=False)
    found = retrofit.with_earlier(table[table.seed == 2], path, ["method"])
    assert found.seed.tolist() == [0, 1, 2] * 2 and found.method.nunique() == 2
    assert found.gain.tolist() == [9, 9, 0, 9, 9, 3] and found.method[0] == "window"
    with pytest.raises(ValueError, match="has other columns"):
        retrofit.with_earlier(table.drop(columns="gain_high"), path, ["method"])


def test_the_runs_of_more_are_also_measured_with_a_window(tmp_path, monkeypatch):
    retrofit, asked = script("retrofit"), []
    twin = {"documents": 9, "taken": 0.1, "taken_low": 0.0, "taken_high": 0.2}
    measures = {
        "pointer": {"rows": [twin]}, "copy": {"answer": []}, "induction": {"answer": 128},
        "by_length": {"rows": [{"length": n * 128, "value": n} for n in retrofit.TIMES]},
    }  # fmt: skip

    def measure(cell, folder, overrides):
        asked.append((folder.name, overrides))
        write_report(folder, measures)

    monkeypatch.setattr(retrofit, "measure", measure)
    cell = SimpleNamespace(
        folder=tmp_path, axes={"method": "more"}, seed=7,
        config=lambda: SimpleNamespace(model=SimpleNamespace(seq_length=128)),
    )  # fmt: skip
    found = list(retrofit.rows_of(cell))
    assert asked == [("suite", ()), ("suite_window", ("sliding_window_width=127",))]
    assert [row["method"] for row in found] == ["more", "window"]
    assert found[0]["perplexity_2048"] == 16 and found[0]["gain"] == 0.1


@pytest.mark.parametrize("name", ["pictures"])
def test_a_script_that_no_other_test_reads_can_be_imported(name, monkeypatch):
    """What the scripts import may have moved. `screenshots` needs a browser's packages."""
    monkeypatch.syspath_prepend(ROOT)
    assert script(name).__doc__
