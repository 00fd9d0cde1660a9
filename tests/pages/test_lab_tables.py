"""Test that the lab's pages have the tables of their files, and the script that fills them."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.helpers.paths import ROOT

LAB = ROOT / "docs" / "lab"
FILE = """\
# Two cores, 2 minutes
what,time
old,"1,000"
"new, of a run",2
"""
PAGE = """\
It ran on {place}, 2 minutes.

<!-- tables/times.csv -->

| what | time |
|---|---:|
| old | 3 |

The end, which has 3 lines.
"""


@pytest.fixture(name="tables")
def _tables(monkeypatch):
    monkeypatch.syspath_prepend(LAB)
    return importlib.import_module("lab_tables")


@pytest.mark.parametrize("page", sorted(LAB.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_the_tables_and_conditions_of_its_files(tables, page):
    text = page.read_text()
    assert tables.filled(text) == text, f"run `python docs/lab/lab_tables.py` for {page.name}"
    assert not tables.lost_conditions(text)


def test_every_file_fills_one_table():
    pages = "".join(page.read_text() for page in LAB.glob("*.md"))
    named = re.findall(r"<!-- tables/(\w+)\.csv -->\n\n\|", pages)
    assert sorted(named) == sorted(path.stem for path in (LAB / "tables").glob("*.csv"))


def test_the_script_fills_a_table_and_refuses_a_page_without_its_conditions(
    tables, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tables, "LAB", tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "times.csv").write_text(FILE)
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(place="Two\ncores"))
    assert tables.main() == 0
    filled = "| what | time |\n|---|---:|\n| old | 1,000 |\n| new, of a run | 2 |\n\nThe end, "
    assert filled in page.read_text() and page.read_text().startswith("It ran on Two\ncores")
    page.write_text(before := PAGE.format(place="two"))
    assert tables.main() == 1 and page.read_text() == before
    assert "page.md lacks 'Two cores, 2 minutes'" in capsys.readouterr().err
