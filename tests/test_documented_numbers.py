"""Test that the numbers on the pages are those of the committed CSV files."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest


def rows(page: Path, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table under a heading of a page, by the table's column names."""
    section = re.split(r"\n#+ ", page.read_text().split(f"## {heading}\n")[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    names, _, *cells = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(names, each, strict=True)) for each in cells]


def assert_rounded(text: str, value: float) -> None:
    decimals = len(text.partition(".")[2])
    assert text == f"{value:,.{decimals}f}"


def test_perplexities_of_the_quickstart(repo_root):
    table = rows(repo_root / "docs" / "results.md", "Perplexity by length")
    embeddings = list(table[0])[2:]
    assert len(table) == 5 and len(embeddings) >= 6
    for embedding in embeddings:
        name = re.sub(r"\W+", "_", embedding)
        results = pd.read_csv(repo_root / "docs" / "quickstart" / f"extrapolation_{name}.csv")
        measured = results.set_index("length")
        for row in table:
            found = measured.loc[int(row["length"].replace(",", ""))]
            perplexity, error = row[embedding].split(" ± ")
            assert_rounded(perplexity, found.perplexity)
            assert_rounded(error, found.perplexity * found.stderr)


@pytest.mark.parametrize(("text", "value"), [("3.57", 3.581), ("1,380", 1381.0)])
def test_a_wrong_number_is_found(text, value):
    with pytest.raises(AssertionError):
        assert_rounded(text, value)
