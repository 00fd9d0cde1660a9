"""Register the rules between config fields (`relation`), and check all of them (`broken`)."""

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

    The decorated function gets the values of these fields as its arguments. If the values break the
    rule, it returns a pair (field name, error message), otherwise None.

    Args:
        names: The names of the fields. By default, these are the names of the function's
            parameters.
        unset: Whether the rule also applies if the value of a field is None.
    """

    def register(function: Relation) -> Relation:
        _RELATIONS.append((names or tuple(signature(function).parameters), unset, function))
        return function

    return register


def broken(values: Values) -> Iterator[Found]:
    """Yield (field name, error message) for each rule that is broken.

    A rule is skipped if one of its fields is missing in `values`.

    Args:
        values: Maps the names of fields to their values.
    """
    for names, unset, check in _RELATIONS:
        given = [values[name] for name in names if name in values]
        applies = len(given) == len(names) and (unset or None not in given)
        if applies and (found := check(*given)):
            yield found
