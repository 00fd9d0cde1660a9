"""Test that the accuracies on the page of the length tasks are those of the committed CSV files."""

from __future__ import annotations

import pandas as pd

from tests.test_documented_numbers import assert_rounded, one_line, rows


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


def test_crosses_on_the_length_tasks(repo_root):
    table = rows(repo_root / "docs" / "length_tasks.md", "Measured: crosses of terms")
    found = pd.read_csv(repo_root / "docs" / "length_tasks" / "crosses.csv")
    percent = 100 * found.set_index(["metric", "task", "embedding", "length"])["value"]
    assert 3 * len(table) == len(found) / 2
    for row in table:
        task, embedding = row.pop("task"), row.pop("embedding").replace(" + ", "+")
        for length, cell in row.items():
            n = int(length.removeprefix("length "))
            values = (percent[metric, task, embedding, n] for metric in ("exact", "token"))
            for text, value in zip(cell.split(" / "), values, strict=True):
                assert_rounded(text, value)
