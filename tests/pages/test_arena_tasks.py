"""Test the scores of the arena's length tasks by hand."""

from __future__ import annotations

import importlib

import pandas as pd
import pytest

from tests.helpers.paths import ROOT


@pytest.fixture(name="arena_tasks")
def _arena_tasks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "lab")
    return importlib.import_module("arena_tasks")


def table_of(runs):
    """Return rows of results.csv for {(task, seed): shares of right answers at 10, 20, 40}."""
    rows = [
        {
            "length": length, "metric": metric, "value": value if metric == "exact" else 0.0,
            "cell": f"{task}-none-{seed}", "task": task, "embedding": "none", "seed": seed,
            "folder": "runs",
        }
        for (task, seed), values in runs.items()
        for length, value in zip((10, 20, 40), values, strict=True)
        for metric in ("exact", "token")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_run_learns_and_generalizes_by_its_score(arena_tasks, tmp_path):
    """The score of parity leaves out what guessing gives: 90% right is 0.8, 70% right is 0.4."""
    runs = {
        ("parity", 1): (0.9, 0.7, 0.5),  # exactly at both limits
        ("parity", 2): (0.9, 0.69, 0.5),
        ("parity", 3): (0.89, 0.89, 0.89),  # not learnt, so it cannot generalize
        ("copy", 1): (1.0, 0.5, 0.0),
        ("copy", 2): (0.8, 0.39, 0.1),
        ("copy", 3): (0.79, 0.79, 0.2),
    }
    table_of(runs).to_csv(tmp_path / "results.csv", index=False)
    assert arena_tasks.main([str(tmp_path)]) == 0
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert list(zip(scores.task, scores.seed, strict=True)) == list(runs)
    assert scores.score_10.tolist() == pytest.approx([0.8, 0.8, 0.78, 1.0, 0.8, 0.79])
    assert scores.score_40.tolist() == pytest.approx([0, 0, 0.78, 0, 0.1, 0.2])
    assert scores.learnt.tolist() == [True, True, False, True, True, False]
    assert scores.generalizes.tolist() == [True, False, False, True, False, False]
    parity, copy = pd.read_csv(tmp_path / "counts.csv").to_dict("records")
    assert (parity["task"], parity["runs"], parity["learnt"]) == ("parity", 3, 2)
    assert parity["generalizes"] == 1 == copy["generalizes"] and copy["learnt"] == 2
    assert parity["score_20"] == pytest.approx((0.4 + 0.38 + 0.78) / 3, abs=1e-4)
    assert copy["score_40"] == pytest.approx(0.1, abs=1e-4)
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_plot_for_each_task_and_a_curve_for_each_embedding(arena_tasks):
    results = table_of({("copy", 1): (1.0, 0.5, 0.0), ("parity", 1): (0.9, 0.7, 0.5)})
    other = results.assign(embedding="alibi", cell=results.cell + "2")
    plots = arena_tasks.drawn(arena_tasks.scored(pd.concat([results, other]))).axes
    assert [axes.get_xlabel() for axes in plots] == ["length of copy", "length of parity"]
    for axes in plots:
        assert [line.get_label() for line in axes.lines] == ["none", "alibi"]
    assert plots[1].lines[0].get_ydata() == pytest.approx([0.8, 0.4, 0.0])
