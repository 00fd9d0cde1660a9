"""Collect the rules between fields (`relation`) and check them all (`broken`)."""

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

Values = dict[str, Any]
"""Maps the names of fields to their values. Fields with invalid values are missing."""
Found = tuple[str, str]
"""A problem: (the name of the field to report, the error message)."""
Relation = Callable[..., "Found | None"]
_RELATIONS: list[tuple[tuple[str, ...], bool, Relation]] = []


def relation(*names: str, unset: bool = False) -> Callable[[Relation], Relation]:
    """Return a decorator that registers a function as a rule for the fields `names`.

    The function takes the values of these fields. It returns None if they fit together, otherwise
    (field name, error message).

    Args:
        names: The fields. Without names, they are the fields that the function's parameters name.
        unset: Whether the rule also applies if a field is None.
    """

    def register(function: Relation) -> Relation:
        _RELATIONS.append((names or tuple(signature(function).parameters), unset, function))
        return function

    return register


def broken(values: Values) -> Iterator[Found]:
    """Yield (field name, error message) for each rule that `values` break.

    A rule is skipped if one of its fields is not in `values`.
    """
    for names, unset, check in _RELATIONS:
        given = [values[name] for name in names if name in values]
        applies = len(given) == len(names) and (unset or None not in given)
        if applies and (found := check(*given)):
            yield found
