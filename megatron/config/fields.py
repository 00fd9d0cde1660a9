"""The types a configuration field can have, each refusing with a sentence that says what to write.

Every type is an ``Annotated`` whose ``BeforeValidator`` does the whole check and raises
``ValueError`` with text fit for the user. YAML floats that are whole (``1e5``) are whole numbers;
text is never turned into a number, nor a number into text or a flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator

from megatron.config.errors import did_you_mean
from megatron.config.reader import scalar


@dataclass(frozen=True)
class Key:
    """Dotted NeoX key of a field where it is not the field's own name; None: derived, no key."""

    path: str | None


def key_of(section: type[BaseModel], name: str) -> str | None:
    """Dotted NeoX key of a section's field; None for a derived one."""
    keys = [m.path for m in section.model_fields[name].metadata if isinstance(m, Key)]
    return keys[0] if keys else name


class FrozenDict(dict):
    """A dict that refuses to change; equal to, and serialised as, a plain one."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> None:
        raise TypeError("the configuration is frozen; load it again with an override")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple:
        return FrozenDict, (dict(self),)  # pickling would otherwise set items one by one


def show(value: Any) -> str:
    """A value as the message names it: ``the text 'abc'``, ``true``, ``null``, ``[1, 2]``."""
    if isinstance(value, str):
        return f"the text {value!r}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    return str(value)


def _wrong(expected: str, value: Any, write: str) -> ValueError:
    if "number" in expected and isinstance(value, str) and isinstance(scalar(value), (int, float)):
        write = f"{value} without quotes"
    return ValueError(f"expected {expected}, got {show(value)}; write {write}")


def _bounds(low: float | None, high: float | None, above: bool) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" above {low}" if above else f" of at least {low}"
    return ""


def _within(value: float, low: float | None, high: float | None, above: bool) -> bool:
    if low is not None and (value <= low if above else value < low):
        return False
    return high is None or value <= high


def whole(low: int | None = None, high: int | None = None, *, write: str = "e.g. 100") -> Callable:
    """Checks a whole number within the inclusive bounds."""
    expected = "a whole number" + _bounds(low, high, False)

    def check(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(expected, value, write)
        if not _within(value, low, high, False):
            raise _wrong(expected, value, write)
        return value

    return check


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    above: bool = False,
    write: str = "e.g. 0.1",
) -> Callable:
    """Checks a finite number within the bounds (``above``: ``low`` itself excluded)."""
    expected = "a number" + _bounds(low, high, above)

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(expected, value, write)
        if not math.isfinite(value) or not _within(value, low, high, above):
            raise _wrong(expected, value, write)
        return float(value)

    return check


def one_of(
    values: Any,
    *,
    aliases: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Callable:
    """Checks one of the names of a ``Literal`` (in any case); aliases are replaced by the name.

    ``refused`` maps names that exist elsewhere to the reason why they are not accepted here.
    """
    names, aliases, refused = get_args(values), aliases or {}, refused or {}
    known = {name.lower(): name for name in names} | {k.lower(): v for k, v in aliases.items()}
    no = {name.lower(): reason for name, reason in refused.items()}
    listing = ", ".join(names)

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong(f"one of {listing}", value, f"e.g. {names[0]}")
        if value.lower() in no:
            raise ValueError(f"{value!r} is refused: {no[value.lower()]}; write one of {listing}")
        if value.lower() not in known:
            hint = did_you_mean(value, [*names, *aliases], f"write one of {listing}")
            raise ValueError(f"unknown value {value!r}; {hint}")
        return known[value.lower()]

    return check


def flag(value: Any) -> bool:
    """Checks true or false."""
    if not isinstance(value, bool):
        raise _wrong("true or false", value, "true or false, without quotes")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong("text", value, "it between quotes")
    return value


def off(reason: str) -> Callable:
    """Checks a flag that only false (what the code does) can be."""

    def check(value: Any) -> bool:
        if flag(value):
            raise ValueError(f"true is refused: {reason}; write false")
        return value

    return check


def degree(value: Any) -> int:
    """Checks a degree of parallelism; NeoX writes 0 for 1 too."""
    return max(1, whole(0, write="1 for none")(value))


def whole_list(low: int) -> Callable:
    """Checks a list of whole numbers; ``128,256`` (handy after ``-o``) is read as one too."""
    each = whole(low)

    def check(value: Any) -> tuple[int, ...]:
        if isinstance(value, str):
            parts = value.split(",")
            value = [int(p) if p.strip().isdecimal() else p for p in parts]
        elif isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise _wrong("a list of whole numbers", value, "e.g. [128, 256]")
        return tuple(each(item) for item in value)

    return check


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise _wrong("two numbers", value, "e.g. [0.9, 0.999]")
    for beta in value:
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1:
            raise _wrong("two numbers from 0 to below 1", value, "e.g. [0.9, 0.999]")
    return float(value[0]), float(value[1])


def _split(value: Any) -> str:
    """Proportions of train, valid and test documents, as NeoX writes them."""
    write = "e.g. '969, 30, 1'"
    value = str(value) if isinstance(value, (int, float)) else value
    if not isinstance(value, str):
        raise _wrong("proportions of train, valid and test as text", value, write)
    parts = value.replace("/", ",").split(",")
    try:
        sizes = [float(part) for part in parts]
    except ValueError:
        raise _wrong("proportions of train, valid and test", value, write) from None
    if len(sizes) > 3 or not all(0 <= s < math.inf for s in sizes) or not sum(sizes) > 0:
        raise _wrong("up to three proportions >= 0, not all zero", value, write)
    return value


Positive = Annotated[int, BeforeValidator(whole(1))]
Count = Annotated[int, BeforeValidator(whole(0))]
PositiveNumber = Annotated[float, BeforeValidator(number(0, above=True))]
Epsilon = Annotated[float, BeforeValidator(number(0, above=True, write="e.g. 1e-8"))]
Degree = Annotated[int, BeforeValidator(degree)]
Amount = Annotated[float, BeforeValidator(number(0))]
Probability = Annotated[float, BeforeValidator(number(0, 1))]
Flag = Annotated[bool, BeforeValidator(flag)]
Text = Annotated[str, BeforeValidator(_text)]
Lengths = Annotated[tuple[int, ...], BeforeValidator(whole_list(1))]
Steps = Annotated[tuple[int, ...], BeforeValidator(whole_list(0))]
Betas = Annotated[tuple[float, float], BeforeValidator(_betas)]
Split = Annotated[str, BeforeValidator(_split)]
Frozen = Annotated[dict[str, Any], AfterValidator(FrozenDict)]
