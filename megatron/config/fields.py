"""The types that a configuration field can have. Each refuses with text that names the remedy.

Every type is an `Annotated` whose `BeforeValidator` does the complete check and raises
`ValueError` with text for the user. YAML floats without a fraction (`1e5`) are whole numbers;
text is never turned into a number, nor a number into text or a flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator

from megatron.config.reader import scalar
from megatron.suggest import did_you_mean

Check = Callable[[Any], Any]
"""Returns the value to use for what was written. ValueError: it is wrong, and what to write."""


@dataclass(frozen=True)
class Key:
    """Dotted NeoX key of a field if it is not the field's name; None: the field is only derived."""

    path: str | None


def key_of(section: type[BaseModel], name: str) -> str | None:
    """Dotted NeoX key of a section's field; None for a derived one."""
    keys = [m.path for m in section.model_fields[name].metadata if isinstance(m, Key)]
    return keys[0] if keys else name


class FrozenDict(dict):
    """A dict that refuses to change; equal to, and serialised as, a plain one."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("the configuration is frozen; load it again with an override")

    __setitem__ = __delitem__ = clear = pop = popitem = __ior__ = _refuse
    setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]  # it accepts any call

    def __reduce__(self) -> tuple:
        return FrozenDict, (dict(self),)  # unpickling would otherwise set the items one by one


def show(value: Any) -> str:
    """A value as messages name it: `the text 'abc'`, `true`, `null`, `[1, 2]`."""
    if isinstance(value, str):
        return f"the text {value!r}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    return str(value)


def is_number(value: Any) -> bool:
    """Whether a value is an int or float; true and false are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(expected: str, value: Any, write: str) -> ValueError:
    if "number" in expected and isinstance(value, str) and is_number(scalar(value)):
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


def whole_number(
    low: int | None = None, high: int | None = None, *, write: str = "e.g. 100"
) -> Check:
    """Checks a whole number within the inclusive bounds."""
    expected = "a whole number" + _bounds(low, high, False)

    def check(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_number(value) or isinstance(value, float) or not _within(value, low, high, False):
            raise _wrong(expected, value, write)
        return value

    return check


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    above: bool = False,
    write: str = "e.g. 0.1",
) -> Check:
    """Checks a finite number within the bounds (`above`: `low` itself excluded)."""
    expected = "a number" + _bounds(low, high, above)

    def check(value: Any) -> float:
        if not is_number(value) or not math.isfinite(value) or not _within(value, low, high, above):
            raise _wrong(expected, value, write)
        return float(value)

    return check


def one_of(
    names: Iterable[str],
    *,
    aliases: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Check:
    """Checks one of `names`, in any case; an alias is replaced by its name.

    `refused` maps names that GPT-NeoX has to the reason why they are not accepted here.
    """
    names, aliases, refused = tuple(names), aliases or {}, refused or {}
    known = {name.lower(): name for name in names} | {k.lower(): v for k, v in aliases.items()}
    reasons = {name.lower(): reason for name, reason in refused.items()}
    listing = ", ".join(names)

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong(f"one of {listing}", value, f"e.g. {names[0]}")
        if reason := reasons.get(value.lower()):
            raise ValueError(f"{value!r} is refused: {reason}; write one of {listing}")
        if value.lower() not in known:
            hint = did_you_mean(value, [*names, *aliases]).rstrip() or f"write one of {listing}"
            raise ValueError(f"unknown value {value!r}; {hint}")
        return known[value.lower()]

    return check


def flag(value: Any) -> bool:
    """Checks true or false."""
    if not isinstance(value, bool):
        raise _wrong("true or false", value, "true or false, without quotes")
    return value


def text(value: Any) -> str:
    """Checks text that is not empty."""
    if not isinstance(value, str) or not value:
        raise _wrong("text", value, "it between quotes")
    return value


def degree(value: Any) -> int:
    """Checks a degree of parallelism; GPT-NeoX also writes 0 for 1."""
    return max(1, whole_number(0, write="1 for none")(value))


def whole_numbers(low: int) -> Check:
    """Checks a list of whole numbers; the text `128,256` (handy after `-o`) is read as one too."""
    check_item = whole_number(low)

    def check(value: Any) -> tuple[int, ...]:
        if isinstance(value, str):
            items = value.split(",")
            value = [int(item) if item.strip().isdecimal() else item for item in items]
        elif isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise _wrong("a list of whole numbers", value, "e.g. [128, 256]")
        return tuple(check_item(item) for item in value)

    return check


def _betas(value: Any) -> tuple[float, float]:
    write = "e.g. [0.9, 0.999]"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise _wrong("two numbers", value, write)
    if not all(is_number(beta) and 0 <= beta < 1 for beta in value):
        raise _wrong("two numbers from 0 to below 1", value, write)
    return float(value[0]), float(value[1])


def _split(value: Any) -> str:
    """Checks the proportions of train, valid and test documents, as GPT-NeoX writes them."""
    write = "e.g. '969, 30, 1'"
    value = str(value) if isinstance(value, (int, float)) else value
    if not isinstance(value, str):
        raise _wrong("proportions of train, valid and test as text", value, write)
    try:
        sizes = [float(size) for size in value.replace("/", ",").split(",")]
    except ValueError:
        raise _wrong("proportions of train, valid and test", value, write) from None
    if len(sizes) > 3 or not all(0 <= s < math.inf for s in sizes) or not sum(sizes) > 0:
        raise _wrong("up to three proportions >= 0, not all zero", value, write)
    return value


Positive = Annotated[int, BeforeValidator(whole_number(1))]
Count = Annotated[int, BeforeValidator(whole_number(0))]
PositiveNumber = Annotated[float, BeforeValidator(number(0, above=True))]
Epsilon = Annotated[float, BeforeValidator(number(0, above=True, write="e.g. 1e-8"))]
Degree = Annotated[int, BeforeValidator(degree)]
Amount = Annotated[float, BeforeValidator(number(0))]
Probability = Annotated[float, BeforeValidator(number(0, 1))]
Flag = Annotated[bool, BeforeValidator(flag)]
Text = Annotated[str, BeforeValidator(text)]
Lengths = Annotated[tuple[int, ...], BeforeValidator(whole_numbers(1))]
Steps = Annotated[tuple[int, ...], BeforeValidator(whole_numbers(0))]
Betas = Annotated[tuple[float, float], BeforeValidator(_betas)]
Split = Annotated[str, BeforeValidator(_split)]
Frozen = Annotated[dict[str, Any], AfterValidator(FrozenDict)]
