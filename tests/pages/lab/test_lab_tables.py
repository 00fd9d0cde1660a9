"""Test that the lab's pages have the tables of their files, and the script that fills them."""

from __future__ import annotations

import csv
import importlib
import re

import pandas as pd
import pytest

from tests.helpers.paths import ROOT
from tests.pages.figures.held import says

LAB = ROOT / "docs" / "lab"
CONDITIONS = pd.read_csv(LAB / "conditions.csv").to_numpy().tolist()


@pytest.fixture(name="tables")
def _tables():
    return importlib.import_module("lab_tables")


@pytest.mark.parametrize("page", sorted(LAB.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_the_tables_of_its_files(tables, page):
    text = page.read_text()
    assert tables.filled(text) == text, f"run `python docs/lab/lab_tables.py` for {page.name}"


def test_every_file_fills_one_table():
    pages = "".join(page.read_text() for page in LAB.glob("*.md"))
    named = re.findall(r"<!-- tables/(\w+)\.csv -->\n\n\|", pages)
    for path in (LAB / "tables").glob("*.csv"):
        with path.open(newline="") as file:
            assert len({len(row) for row in csv.reader(file)}) == 1, f"{path.name}: unequal rows"
    assert sorted(named) == sorted(path.stem for path in (LAB / "tables").glob("*.csv"))


@pytest.mark.parametrize(("page", "text"), CONDITIONS)
def test_a_page_says_its_conditions(page, text):
    says(page, text)


def test_the_script_fills_tables_and_leaves_all_else(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LAB", tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "times.csv").write_text('what,time\nold,"1,000"\n"new, or not",2\n')
    start, mark = "It ran for 2\nminutes.\n\n", "<!-- tables/times.csv -->\n\n"
    old, end = "| what | time |\n|---|---:|\n| old | 3 |\n", "\nThe end, with 3 lines.\n"
    new = "| what | time |\n|---|---:|\n| old | 1,000 |\n| new, or not | 2 |\n"
    page = tmp_path / "page.md"
    page.write_text(start + mark + old + end)
    tables.main()
    assert page.read_text() == start + mark + new + end
    wider = "| what | time | on |\n|---|---:|---|\n| old | 3 | a |\n"
    for other in ("", wider):
        page.write_text(start + mark + other + end)
        tables.main()
        assert page.read_text() == start + mark + new.replace("---:", "---") + end
