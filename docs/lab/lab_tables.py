"""Write the tables of the lab's pages from the CSV files in docs/lab/tables.

    python docs/lab/lab_tables.py

The table below the line `<!-- tables/NAME.csv -->` of a page comes from NAME.csv. The cells are
Markdown. conditions.csv has what pages say outside such tables, for example machine and date. A
test compares the pages with all of these files.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from megatron.files import write_text

LAB = Path(__file__).parent
MARKED = re.compile(r"(<!-- (tables/\w+\.csv) -->\n\n)((?:\|.*\n)*)")


def main() -> None:
    for page in sorted(LAB.glob("*.md")):
        write_text(page, filled(page.read_text()))


def filled(text: str) -> str:
    """Return the text of a page with the rows of its files. Each table keeps its alignment."""
    return MARKED.sub(lambda found: found[1] + table_of(found[2], found[3]), text)


def table_of(name: str, shown: str) -> str:
    """Return the table of a file, with the alignment of the table that the page shows now."""
    with (LAB / name).open(newline="") as file:
        header, *rows = csv.reader(file)
    alignment = "".join(shown.splitlines()[1:2])
    if alignment.count("|") != len(header) + 1:  # a new table, or other columns
        alignment = "|" + "---|" * len(header)
    cells = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([cells[0], alignment, *cells[1:]]) + "\n"


if __name__ == "__main__":
    main()
