"""Suggest the most similar known name for an unknown name."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the name in `known` that is most similar to `word`, ignoring case.

    Args:
        cutoff: The required similarity, from 0 to 1 as in `difflib`. If no name is similar enough,
            the result is None.
    """
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the text `did you mean NAME? ` (with the space), or "" if no known name is similar.

    Args:
        cutoff: The required similarity of NAME and `word`, from 0 to 1 as in `difflib`.
    """
    near = nearest(word, known, cutoff=cutoff)
    return f"did you mean {near}? " if near else ""
