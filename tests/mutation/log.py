"""The log of mutants: a line for each, with the verdict of its tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

KILLED, SLOWLY, SURVIVED, EQUIVALENT, GONE = "killed", "slowly", "survived", "equivalent", "gone"


@dataclass
class Row:
    """A line of the log."""

    verdict: str
    seconds: str
    place: str
    operator: str
    before: str
    after: str
    note: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.place, self.operator, self.before, self.after

    def text(self) -> str:
        return "\t".join(vars(self).values())


def read(log: Path) -> tuple[list[str], list[Row]]:
    """Return the comments and the rows of a log; both are empty if it does not exist."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    comments = [line for line in lines if line.startswith("#")]
    return comments, [Row(*line.split("\t")) for line in lines if line not in comments]


def summary(rows: list[Row]) -> str:
    """Return the number of mutants with each verdict, and the rate of those found."""
    counts = Counter(row.verdict for row in rows)
    counted = len(rows) - counts[EQUIVALENT]
    dead = counted - counts[SURVIVED]
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    share = f"{dead / counted:.1%}" if counted else "none"
    return f"{len(rows)} mutants: {verdicts}; {dead} of {counted} not equivalent are dead ({share})"
