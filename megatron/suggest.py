"""Suggestions for unknown names: the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The name in `known` that is most like `word`, ignoring case; None if none is near."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`did you mean NAME? ` (with the space), or nothing if no known name is near."""
    near = nearest(word, known, cutoff=cutoff)
    return f"did you mean {near}? " if near else ""
