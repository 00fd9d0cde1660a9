"""What can be wrong with a configuration, and how it is said.

A problem is one line, ``file:line: key: what is wrong; what to write instead``. All problems of a
configuration are collected and raised together as one :class:`ConfigError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
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
    """One thing that is wrong. ``key`` is dotted (``optimizer.params.lr``) or empty."""

    mark: Mark | None
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.mark, self.key, self.text) if part)


class ConfigError(Exception):
    """Raised with every problem found; ``str(error)`` is the report, one problem a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([f"{head} in the configuration:", *map(str, self.problems)])


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None where nothing comes near it."""
    folded = {candidate.lower(): candidate for candidate in sorted(candidates)}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def did_you_mean(word: str, candidates: Iterable[str], otherwise: str) -> str:
    """``"did you mean X?"`` with the nearest candidate, else the text given for that case."""
    match = nearest(word, candidates)
    return f"did you mean {match}?" if match else otherwise
