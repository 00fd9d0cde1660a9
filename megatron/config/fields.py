"""Define the types of config fields.

Every type is a `typing.Annotated` with a pydantic `BeforeValidator`, which does the complete check.
If a value is invalid, the check raises `ValueError`. The error message tells the user what to write
instead. YAML floats without a fraction (`1e5`) are accepted as whole numbers. Text is never
converted to a number. A number is never converted to text or to a flag.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator

from megatron.config.reader import scalar
from megatron.suggest import did_you_mean

Check = Callable[[Any], Any]
"""A function that takes the value in the config file and returns the value to use.

It raises ValueError for an invalid value, with a message that tells the user what to write instead.
"""


@dataclass(frozen=True)
class Key:
    """An annotation that gives a config field a key other than the field's name.

    Attributes:
        path: The field's dotted key in config files, or None if no config file can set the field.
    """

    path: str | None


def key_of(section: type[BaseModel], name: str) -> str | None:
    """Return the dotted key of a field in config files, or None if the field has no key.

    Args:
        section: The class of the config section that declares the field.
        name: The name of the field.
    """
    keys = [m.path for m in section.model_fields[name].metadata if isinstance(m, Key)]
    return keys[0] if keys else name


class FrozenDict(dict):
    """An immutable dict, which equals a plain dict with the same items.

    Every method that would change the dict raises TypeError.
    """

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("the configuration is frozen; load it again with an override")

    __setitem__ = __delitem__ = clear = pop = popitem = __ior__ = _refuse
    setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]  # it accepts any call

    def __reduce__(self) -> tuple:
        return FrozenDict, (dict(self),)  # by default, unpickling sets items, which is refused here


def show(value: Any) -> str:
    """Format a value for error messages, such as `the text 'abc'`, `true`, `null` or `[1, 2]`."""
    if isinstance(value, str):
        return f"the text {value!r}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    return str(value)


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def wrong(expected: str, value: Any, write: str) -> ValueError:
    """Return a ValueError for a wrong value. The message names the fault and the remedy.

    Args:
        expected: A description of valid values.
        value: The wrong value.
        write: An example of a valid value.
    """
    if expected.startswith(("a number", "a whole number")) and isinstance(value, str):
        write = f"{value} without quotes" if is_number(scalar(value)) else write
    return ValueError(f"expected {expected}, got {show(value)}; write {write}")


LARGEST = 10**12
"""The largest whole number that any key takes."""


def number(
    low: float,
    high: float | None = None,
    *,
    above: bool = False,
    whole: bool = False,
    write: str = "e.g. 0.1",
) -> Check:
    """Return a function that checks that a value is a finite number from `low` to `high`.

    Args:
        low: The lower bound.
        high: The upper bound, which is itself allowed; None for no upper bound.
        above: Whether the value must be greater than `low`. If false, `low` itself is allowed.
        whole: Whether the value must be whole.
        write: An example of a valid value for the error message.
    """
    # If `whole` is true, the function returns an int, otherwise a float.
    bounds = f" above {low}" if above else f" of at least {low}"
    if high is not None:
        bounds = f" above {low}, up to {high}" if above else f" from {low} to {high}"
    expected = ("a whole number" if whole else "a number") + bounds
    largest = sys.float_info.max if high is None else high

    def check(value: Any) -> float:
        fits = is_number(value) and low <= value <= largest and not (above and value == low)
        if not fits or (whole and value % 1):
            raise wrong(expected, value, write)
        if whole and value > LARGEST:
            raise ValueError(f"{value:.3g} is above {LARGEST:,}; write a smaller number")
        return int(value) if whole else float(value)

    return check


def whole_number(low: int, high: int | None = None, *, write: str = "e.g. 100") -> Check:
    """Return a function that checks that a value is a whole number from `low` to `high`.

    Args:
        low: The lower bound, which is itself allowed.
        high: The upper bound, which is itself allowed; None for no upper bound.
        write: An example of a valid value for the error message.
    """
    return number(low, high, whole=True, write=write)


def one_of(
    names: Iterable[str],
    *,
    aliases: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Check:
    """Return a function that checks that a value is one of `names`, ignoring case.

    Args:
        names: The accepted names.
        aliases: Maps each alias to the name in `names` that replaces the alias.
        refused: Maps each refused name to the reason for the refusal.
    """
    names, aliases, refused = tuple(names), aliases or {}, refused or {}
    known = {name.lower(): name for name in names} | {k.lower(): v for k, v in aliases.items()}
    reasons = {name.lower(): reason for name, reason in refused.items()}
    listing = ", ".join(names)

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise wrong(f"one of {listing}", value, f"e.g. {names[0]}")
        if reason := reasons.get(value.lower()):
            raise ValueError(f"{value!r} is refused: {reason}; write one of {listing}")
        if value.lower() not in known:
            hint = did_you_mean(value, [*names, *aliases]).rstrip() or f"write one of {listing}"
            raise ValueError(f"unknown value {value!r}; {hint}")
        return known[value.lower()]

    return check


def flag(value: Any) -> bool:
    """Return `value` if it is True or False, otherwise raise ValueError."""
    if not isinstance(value, bool):
        raise wrong("true or false", value, "true or false, without quotes")
    return value


def text(value: Any) -> str:
    """Return `value` if it is non-empty text, otherwise raise ValueError."""
    if not isinstance(value, str) or not value:
        raise wrong("text", value, "it between quotes")
    return value


def texts(expected: str, write: str, *, commas: bool = False) -> Check:
    """Return a function that checks a list of non-empty texts and returns it as a tuple.

    Args:
        expected: A description of the list, for the error message.
        write: An example of a valid value for the error message.
        commas: Whether to split a single text at its commas into several texts.
    """
    # A single text counts as a list of one text.

    def check(value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [x.strip() for x in value.split(",")] if commas else [value]
        if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) and x for x in value):
            raise wrong(expected, value, write)
        return tuple(value)

    return check


def degree(value: Any) -> int:
    """Check a degree of parallelism, and return it. For the degree 0, return 1."""
    # In GPT-NeoX's configs, 0 means the same as 1: no parallelism of that kind.
    return max(1, whole_number(0, write="1 for none")(value))


def whole_numbers(low: int) -> Check:
    """Return a function that checks that a value is a list of whole numbers of at least `low`.

    Args:
        low: The lower bound, which is itself allowed.
    """
    # The function also accepts a single number, or text such as `128,256`.
    check_item = whole_number(low)

    def check(value: Any) -> tuple[int, ...]:
        if isinstance(value, str):
            items = value.split(",")
            value = [int(item) if item.strip().isdecimal() else item for item in items]
        elif isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise wrong("a list of whole numbers", value, "e.g. [128, 256]")
        return tuple(check_item(item) for item in value)

    return check


def _betas(value: Any) -> tuple[float, float]:
    write = "e.g. [0.9, 0.999]"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise wrong("two numbers", value, write)
    if not all(is_number(beta) and 0 <= beta < 1 for beta in value):
        raise wrong("two numbers from 0 to below 1", value, write)
    return float(value[0]), float(value[1])


def _stages(value: Any) -> tuple[tuple[int, int], ...]:
    """Check and return a list of pairs (step, length). Steps are at least 0, lengths at least 1."""
    pairs = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise wrong("a list of [step, length]", value, "e.g. [[0, 128], [5000, 512]]")
    return tuple((whole_number(0)(step), whole_number(1)(length)) for step, length in pairs)


def _split(value: Any) -> str:
    """Check the proportions of train, valid and test documents, and return them as text."""
    write = "e.g. '969, 30, 1'"
    value = str(value) if isinstance(value, (int, float)) else value
    if not isinstance(value, str):
        raise wrong("proportions of train, valid and test as text", value, write)
    try:
        sizes = [float(size) for size in value.replace("/", ",").split(",")]
    except ValueError:
        raise wrong("proportions of train, valid and test", value, write) from None
    if len(sizes) > 3 or not all(0 <= s < math.inf for s in sizes) or not sum(sizes) > 0:
        raise wrong("up to three proportions >= 0, not all zero", value, write)
    return value


Positive = Annotated[int, BeforeValidator(whole_number(1))]
Count = Annotated[int, BeforeValidator(whole_number(0))]
ExitCode = Annotated[int, BeforeValidator(whole_number(0, 255))]
PositiveNumber = Annotated[float, BeforeValidator(number(0, above=True))]
Epsilon = Annotated[float, BeforeValidator(number(0, above=True, write="e.g. 1e-8"))]
Degree = Annotated[int, BeforeValidator(degree)]
Amount = Annotated[float, BeforeValidator(number(0))]
Probability = Annotated[float, BeforeValidator(number(0, 1))]
Flag = Annotated[bool, BeforeValidator(flag)]
Text = Annotated[str, BeforeValidator(text)]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(texts("a list of names", "e.g. [lambada_openai, piqa]", commas=True)),
]
Lengths = Annotated[tuple[int, ...], BeforeValidator(whole_numbers(1))]
Steps = Annotated[tuple[int, ...], BeforeValidator(whole_numbers(0))]
Betas = Annotated[tuple[float, float], BeforeValidator(_betas)]
Stages = Annotated[tuple[tuple[int, int], ...], BeforeValidator(_stages)]
Split = Annotated[str, BeforeValidator(_split)]
Frozen = Annotated[dict[str, Any], AfterValidator(FrozenDict)]
