"""Test what the suite answers about planted models, whose use of context is known."""

from __future__ import annotations

import csv
from collections import Counter

import pytest

from tests.evaluation.suite.confusion import judged, rows_of
from tests.evaluation.suite.planted import EXPECTED, NAMES


@pytest.mark.parametrize("name", ["bag of words", "harmful cache", "order-blind copier"])
def test_the_suite_is_not_fooled(name):
    """On a language that is not in the table."""
    rows = rows_of(name, seed=100, tokens=2048)
    assert len(rows) == 10 and [row for row in rows if row["right"] != "yes"] == []


def test_an_answer_is_right_false_or_misses_something():
    some, more = frozenset({(128, 0.5)}), frozenset({(128, 0.5), (512, 0.5)})
    assert (
        judged(16, 16) == judged((0, 256), 256) == judged(some, some) == judged(True, True) == "yes"
    )
    assert judged(16, 1) == judged(512, 256) == judged(more, some) == "missed"
    assert judged("helps", "unclear") == judged(True, "unclear") == "missed"
    assert judged(0, 256) == judged(some, more) == judged("helps", "harms") == "no"
    assert judged(False, True) == judged(True, False) == "no"


@pytest.mark.parametrize(
    ("name", "most_missed"), [("suite_planted", 6), ("suite_planted_more_text", 0)]
)
def test_the_tables_of_answers_have_no_false_one(repo_root, name, most_missed):
    with (repo_root / "docs" / "results" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    asked = {(row["model"], row["question"]) for row in rows}
    questions = vars(EXPECTED["pointer"])
    assert asked == {(name, question) for name in NAMES for question in questions}
    assert len(rows) == len({row["seed"] for row in rows}) * len(asked)
    right = Counter(row["right"] for row in rows)
    assert right["yes"] + right["missed"] == len(rows) and right["missed"] <= most_missed
