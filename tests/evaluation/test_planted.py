"""Test what the suite answers about planted models, whose use of context is known."""

from __future__ import annotations

import csv

import pytest

from tests.evaluation.confusion import rows_of
from tests.evaluation.planted import EXPECTED, NAMES


@pytest.mark.parametrize("name", ["bag of words", "harmful cache", "order-blind copier"])
def test_the_suite_is_not_fooled(name):
    """On a language that is not in the table."""
    rows = rows_of(name, seed=100, tokens=2048)
    assert len(rows) == 10 and [row for row in rows if row["right"] != "yes"] == []


def test_the_table_of_answers_has_no_wrong_one(repo_root):
    with (repo_root / "docs" / "results" / "suite_planted.csv").open() as file:
        rows = list(csv.DictReader(file))
    asked = {(row["model"], row["question"]) for row in rows}
    questions = vars(EXPECTED["pointer"])
    assert asked == {(name, question) for name in NAMES for question in questions}
    assert len({row["seed"] for row in rows}) == 4 and len(rows) == 4 * len(asked)
    assert [row for row in rows if row["right"] != "yes"] == []
