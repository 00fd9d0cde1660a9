"""Test the arena's pictures and the tables of its page, by hand."""

from __future__ import annotations

import importlib
import math

import pandas as pd
import pytest

from tests.pages.lab.test_arena import arena_run, of_seeds


def three_methods():
    return pd.DataFrame(
        [
            *of_seeds("kerple_log", (0.02, 0.021, 0.025)), *of_seeds("bam", (0.03, 0.2, 0.03)),
            *of_seeds("sinusoidal", (-0.3, -0.4, -0.5)),
        ]
    )  # fmt: skip


def points(axes, marker):
    """Return the points with a marker, as (x, place of the method)."""
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return [(round(x, 4), round(y)) for line in lines for x, y in line.get_xydata().tolist()]


def test_each_run_is_a_dot_and_each_method_a_line(tmp_path):
    arena, drawing = (importlib.import_module(name) for name in ("arena", "arena_pictures"))
    values = arena.with_derived(three_methods())
    drawing.draw(values, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {f"{n}.png" for n in drawing.QUESTIONS}
    question, columns = drawing.QUESTIONS["gain"]
    gain, exact = drawing.dots(values, question, columns).axes
    assert [axes.get_xlabel() for axes in (gain, exact)] == [*columns.values()]
    names = [label.get_text() for label in gain.get_yticklabels()]
    assert names == ["sinusoidal", "kerple_log", "bam"]  # the mean gain rises upwards
    seen = [(0.02, 1), (0.021, 1), (0.025, 1), (0.03, 2), (0.03, 2)]
    assert points(gain, "o") == seen
    assert points(gain, ">") == [(0.1, 2)] and points(gain, "<") == [(-0.1, 0)] * 3
    assert points(gain, "|") == [(0.022, 1), (0.0867, 2)]
    [first, *_] = [each for each in gain.collections if len(each.get_segments()) == 3][1:]
    (start, _), (end, _) = first.get_segments()[0]
    assert (start, end) == pytest.approx((0.01, 0.03))


def test_measures_without_an_interval_and_without_a_range():
    arena, drawing = (importlib.import_module(name) for name in ("arena", "arena_pictures"))
    values = arena.with_derived(three_methods())
    places, induction = drawing.dots(values, *drawing.QUESTIONS["recall"]).axes
    assert points(places, "o") == [(9, place) for place in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert {x for x, _ in points(induction, "o")} == {1024}
    level, change = drawing.dots(values, *drawing.QUESTIONS["level"]).axes
    assert not level.collections and not change.collections
    assert points(change, "|") == [(round(math.log(0.9), 4), place) for place in range(3)]


def test_the_picture_of_texts_compares_the_gains_of_one_seed():
    texts, drawing = (importlib.import_module(name) for name in ("arena_texts", "arena_pictures"))
    code = [arena_run("a", 1246, 0.02), arena_run("b", 1246, 0.3), arena_run("a", 1247, 0.05)]
    code += [arena_run("c", 1246, 0.1), arena_run("not on each text", 1246, 0.5)]
    prose = [arena_run(name, 1246, gain) for name, gain in (("a", 0.01), ("b", -0.1), ("c", 0.02))]
    latex = [arena_run(name, 1246, gain) for name, gain in (("a", 0.0), ("b", 0.4), ("c", -0.4))]
    given = {"code": code, "prose": prose, "latex": latex}
    gains = texts.gains_by_text({name: pd.DataFrame(rows) for name, rows in given.items()})
    figure = drawing.on_texts(gains)
    of_code, of_prose, of_latex = figure.axes
    assert [each.get_text() for each in of_code.get_yticklabels()] == ["a", "c", "b"]
    assert points(of_code, "o") == [(0.02, 0), (0.1, 1), (0.3, 2)] and not points(of_code, "<")
    assert points(of_prose, "o") == [(0.01, 0), (0.02, 1)]
    assert points(of_prose, "<") == [(-0.024, 2)]  # 1.2 times the largest gain
    assert points(of_latex, "o") == [(0.0, 0), (-0.4, 1), (0.4, 2)]
    assert of_latex.get_xlabel() == "smaller gain on latex (nats)"
    losses = drawing.on_texts(pd.DataFrame({"code": [-0.1, -0.2]}, index=["a", "b"])).axes[0]
    assert points(losses, "o") == [(-0.2, 0), (-0.1, 1)] and not points(losses, "<")


def test_the_tables_of_the_page_are_the_results(tmp_path, monkeypatch):
    arena, page = (importlib.import_module(name) for name in ("arena", "arena_page"))
    runs = pd.concat(
        [three_methods(), pd.DataFrame(of_seeds("rotary+kerple_log", (0.01, 0.01)))]
    )  # a method with two seeds
    runs.to_csv(tmp_path / "runs.csv", index=False)
    arena.compared(runs, tests=True).to_csv(tmp_path / "methods.csv", index=False)
    claim = {
        "claim": 1, "lower": "bam at 2048", "higher": "alibi at 2048", "in the paper": "Table 3",
        "at 32 times": "2 of 3", "1.3B parameters": None, "difference": 0.01234,
        "verdict": "supported", "arena": "3 of 3", "arena_prose": "0 of 1", "arena_latex": "0 of 0",
    }  # fmt: skip
    pd.DataFrame([claim]).to_csv(tmp_path / "claims.csv", index=False)
    monkeypatch.setattr(page, "TABLES", tmp_path)
    assert page.main([str(tmp_path)]) == 0
    gains, models, tests, verdicts = (
        pd.read_csv(tmp_path / f"arena_{name}.csv", dtype=str, keep_default_na=False)
        for name in ("gains", "models", "p_values", "verdicts")
    )
    names = ["`bam`", "`kerple_log`", "`rotary + kerple_log`", "`sinusoidal`"]
    assert gains.method.tolist() == models.method.tolist() == tests.method.tolist() == names
    assert gains.label.tolist() == ["gains", "gains", "", "loses"]
    assert gains.gain.tolist() == ["0.0867", "0.0220", "0.0100", "-0.4000"]
    assert gains.exact.tolist() == gains.smaller.tolist() == gains.gain.tolist()
    assert gains["SD of smaller"][1] == "0.0026"
    assert gains.share.tolist() == ["43%", "11%", "", ""]
    first = models.iloc[1].to_dict()
    assert (first["perplexity at 128"], first["perplexity at 2,048"]) == ("10.00", "9.00")
    assert (first["change"], first["places"], first["rate"]) == ("-0.105", "9.0", "searched")
    assert models["induction of each run"][2] == "1,024, 1,024"
    assert tests["smaller gain differs from that of `kerple_log`"][1] == ""
    assert tests.iloc[2, 1:].tolist() == [""] * 3 and float(tests.iloc[3, 1]) == 1
    [shown] = verdicts.to_dict("records")
    assert (shown["mean difference"], shown["on code"], shown["verdict"], shown["on prose"]) == (
        "0.0123", "3 of 3", "supported", "0 of 1",
    )  # fmt: skip
    assert shown["on latex"] == ""  # not run
