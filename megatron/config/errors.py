"""Problems of a configuration, and the error that reports them all.

A problem is one line, `file:line: key: what is wrong; what to write instead`. All problems of a
configuration are collected and raised together as one `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """Where a setting was written: a file and a line (counted from 1), or an override (no line)."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `key` is dotted (`optimizer.params.lr`) or empty."""

    mark: Mark | None
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.mark, self.key, self.text) if part)


class ConfigError(Exception):
    """Holds every problem found; `str(error)` is the report, one problem per line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([f"{head} in the configuration:", *map(str, self.problems)])
