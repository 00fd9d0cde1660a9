"""Write the tables of the lab's pages from the CSV files in docs/lab/tables.

    python docs/lab/lab_tables.py

The line `<!-- tables/NAME.csv -->` of a page stands above the table that NAME.csv fills. Cells are
Markdown. The first lines of a file may begin with "# ": each is text of the page that says when,
where and how the values were measured. A page that lacks such a text is an error.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from megatron.files import write_text

LAB = Path(__file__).parent
MARKED = re.compile(r"(<!-- (tables/\w+\.csv) -->\n\n)((?:\|.*\n)*)")


def main() -> int:
    for page in sorted(LAB.glob("*.md")):
        text = filled(page.read_text())
        missing = [f"{page.name} lacks {each!r}" for each in lost_conditions(text)]
        if missing:
            print(*missing, sep="\n", file=sys.stderr)
            return 1
        write_text(page, text)
    return 0


def filled(text: str) -> str:
    """Return the text of a page with the rows of its files. Each table keeps its alignment."""
    return MARKED.sub(lambda found: found[1] + table_of(found[2], found[3]), text)


def lost_conditions(text: str) -> list[str]:
    """Return the conditions in the files of a page that its text lacks."""
    words = " ".join(text.split())
    names = [found[2] for found in MARKED.finditer(text)]
    return [each for name in names for each in conditions(name) if each not in words]


def conditions(name: str) -> list[str]:
    lines = (LAB / name).read_text().splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("# ")]


def table_of(name: str, shown: str) -> str:
    """Return the table of a file, with the alignment of the table that the page shows now."""
    with (LAB / name).open(newline="") as file:
        header, *rows = csv.reader(line for line in file if not line.startswith("# "))
    lines = shown.splitlines()
    alignment = lines[1] if len(lines) > 1 else "|" + "---|" * len(header)
    cells = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([cells[0], alignment, *cells[1:]]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
