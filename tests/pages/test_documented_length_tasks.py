"""Test that the accuracies on the page of the length tasks are those of the committed CSV files."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.helpers.paths import ROOT
from tests.pages.figures.held import one_line, rows


def test_percentages_of_the_length_tasks():
    found = pd.read_csv(ROOT / "docs" / "length_tasks" / "results.csv")
    exact = found[found["metric"] == "exact"].set_index(["task", "length", "embedding"])
    exact = 100 * exact["value"].sort_index()
    text = one_line(ROOT / "docs" / "lab" / "length_task_results.md")
    longer = exact["sort", 20]
    assert f"(`none`) is right on {longer['none']:.1f}% of the rows of twice" in text
    assert f"every other embedding on at most {longer.drop('none').max():.1f}%" in text
    assert f"no embedding is right on more than {exact['copy', 20].max():.1f}%" in text
    learnt = exact["copy", 10].sort_values()
    order = ", ".join(f"`{name}`" for name in learnt.index)
    assert f": {learnt.min():.1f}% to {learnt.max():.1f}%, in the order {order}." in text


@pytest.mark.parametrize(
    ("heading", "file", "runs"),
    [
        ("Measured: five embeddings", "results.csv", 10),
        ("Measured: crosses of terms", "crosses.csv", 66),
    ],
)
def test_accuracies_of_the_length_tasks(heading, file, runs):
    table = rows(ROOT / "docs" / "lab" / "length_task_results.md", heading)
    found = pd.read_csv(ROOT / "docs" / "length_tasks" / file)
    found = found[found["task"] != "mqar"]
    values = found.set_index(["task", "embedding", "length", "metric"])["value"]
    assert len(table) == len(found) / 6 == runs
    for row in table:
        task, embedding, *cells = row.values()
        lengths = sorted(found.loc[found["task"] == task, "length"].unique())
        for length, cell in zip(lengths, cells, strict=True):
            start = (task, embedding.replace(" + ", "+"), length)
            assert cell == " / ".join(f"{100 * values[*start, x]:.1f}" for x in ("exact", "token"))


def test_accuracies_of_recall_with_three_seeds():
    table = rows(
        ROOT / "docs" / "lab" / "length_task_results.md", "Measured: recall with three seeds"
    )
    found = pd.read_csv(ROOT / "docs" / "length_tasks" / "crosses.csv")
    found = found[(found["task"] == "mqar") & (found["metric"] == "exact")]
    values = found.set_index(["embedding", "length", "seed"])["value"].sort_index()
    assert len(table) == len(found) / 9 == 11
    for row in table:
        embedding = row.pop("embedding").replace(" + ", "+")
        for length, cell in row.items():
            assert cell == " / ".join(f"{100 * x:.1f}" for x in values[embedding, int(length)])


def test_percentages_of_the_crosses():
    found = pd.read_csv(ROOT / "docs" / "length_tasks" / "crosses.csv")
    found = found[found["seed"] == 1235].set_index(["metric", "task", "length", "embedding"])
    values = 100 * found["value"].sort_index()
    exact, token = values["exact"], values["token"]
    text = one_line(ROOT / "docs" / "lab" / "length_task_results.md")
    sort, copy = exact["sort", 20], exact["copy", 20]
    sink, cross = "sink+kerple_log", "rotary+kerple_log"
    assert f"(from {sort['kerple_log']:.1f}% to {sort[sink]:.1f}% of the rows)" in text
    others = copy.drop(sink).max()
    said = f"is right on {copy[sink]:.1f}% of the rows of twice the training length, every other"
    assert f"{said} embedding on at most {others:.1f}%" in text
    for task in ("copy", "reverse"):
        assert token[task, 20].idxmin() == cross
    assert max(exact[x].max() for x in (("reverse", 20), ("modular", 20), ("addition", 10))) == 0
    assert (exact["parity", 20] - 50).abs().max() < 5
    addition = exact["addition", 5].sort_values(ascending=False)
    assert set(addition.index[:3]) == {"rotary", cross, "rpe"} and addition.iloc[2] == 100
    fourth, rest = addition.iloc[3], addition.iloc[4]
    assert addition.index[3] == "log_n+kerple_log"
    assert f"is right on {fourth:.1f}%, every other embedding on at most {rest:.1f}%." in text
    shortest = {"sort": 10, "copy": 10, "reverse": 10, "parity": 10, "modular": 10, "addition": 5}
    best = [task for task, n in shortest.items() if exact[task, n, cross] == exact[task, n].max()]
    assert best == [task for task in shortest if task != "sort"]
    assert f"(all but `sort`, {exact['sort', 10, cross]:.1f}%)" in text


def test_percentages_of_recall():
    found = pd.read_csv(ROOT / "docs" / "length_tasks" / "crosses.csv")
    found = found[(found["task"] == "mqar") & (found["metric"] == "exact")]
    exact = 100 * found.pivot_table("value", ["embedding", "seed"], "length")
    text = one_line(ROOT / "docs" / "lab" / "length_task_results.md").split(
        "recall with three seeds"
    )[1]
    learnt = exact[4] >= 90
    guessed = exact.loc[~learnt, 4]
    assert f"{guessed.min():.1f}% to {guessed.max():.1f}% of the examples with 4 keys" in text
    seeds = learnt.groupby("embedding").sum()
    best = "log_n+kerple_log"
    assert set(seeds.index[seeds == 3]) == {"kerple_log", best}
    assert set(seeds.index[seeds == 0]) == {"none", "fire", "rotary"}
    temperature = exact.loc[best, 16]
    log = [f"{x:.1f}%" for x in exact.loc["kerple_log", 16]]
    said = f"{temperature.min():.1f}% to {temperature.max():.1f}% of the examples, and `kerple_log`"
    assert f"{said} on {log[0]}, {log[1]} and {log[2]}." in text
    rotary = exact.loc["rotary+kerple_log"]
    assert seeds["rotary+kerple_log"] == 2
    assert f"right on at most {rotary[16].max():.1f}% of the examples with 16 keys" in text
