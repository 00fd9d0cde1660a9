"""Test that the accuracies on the page of the length tasks are those of the committed CSV files."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.test_documented_numbers import one_line, rows


def test_percentages_of_the_length_tasks(repo_root):
    found = pd.read_csv(repo_root / "docs" / "length_tasks" / "results.csv")
    exact = found[found["metric"] == "exact"].set_index(["task", "length", "embedding"])
    exact = 100 * exact["value"].sort_index()
    text = one_line(repo_root / "docs" / "length_tasks.md")
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
        ("Measured: crosses of terms", "crosses.csv", 33),
    ],
)
def test_accuracies_of_the_length_tasks(heading, file, runs, repo_root):
    table = rows(repo_root / "docs" / "length_tasks.md", heading)
    found = pd.read_csv(repo_root / "docs" / "length_tasks" / file)
    values = found.set_index(["task", "embedding", "length", "metric"])["value"]
    assert len(table) == len(found) / 6 == runs
    for row in table:
        task, embedding, *cells = row.values()
        for length, cell in zip((10, 20, 40), cells, strict=True):
            start = (task, embedding.replace(" + ", "+"), length)
            assert cell == " / ".join(f"{100 * values[*start, x]:.1f}" for x in ("exact", "token"))


def test_percentages_of_the_crosses(repo_root):
    found = pd.read_csv(repo_root / "docs" / "length_tasks" / "crosses.csv")
    values = 100 * found.set_index(["metric", "task", "length", "embedding"])["value"].sort_index()
    exact, token = values["exact"], values["token"]
    text = one_line(repo_root / "docs" / "length_tasks.md")
    sort, copy = exact["sort", 20], exact["copy", 20]
    sink, cross = "sink+kerple_log", "rotary+kerple_log"
    assert f"(from {sort['kerple_log']:.1f}% to {sort[sink]:.1f}% of the rows)" in text
    others = copy.drop(sink).max()
    said = f"is right on {copy[sink]:.1f}% of the rows of twice the training length, every other"
    assert f"{said} embedding on at most {others:.1f}%" in text
    assert exact["reverse", 20].max() == 0
    learnt = [exact[task, 10, cross] for task in ("copy", "reverse")]
    assert f"({learnt[0]:.1f}% and {learnt[1]:.1f}% of the rows at length 10)" in text
    for task, best in zip(("copy", "reverse"), learnt, strict=True):
        assert best == exact[task, 10].max() and token[task, 20].idxmin() == cross
