"""Read config values that may differ from layer to layer.

The syntax is that of GPT-NeoX's `attention_config`. A value is a list of groups [values, repeats]:

[[[rotary], 3], [[none], 1]]     three layers `rotary`, then one layer `none`
[[[rotary, none], 6]]            `rotary` and `none` in turn, six times
[[[rotary, none], all]]          `rotary` and `none` in turn, up to the last layer
"""

from collections.abc import Callable
from typing import Any

EXAMPLE = "e.g. [[[rotary], 3], [[none], 1]]"
ALL = "all"


def per_layer(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that checks a config value that may differ from layer to layer.

    The config value is one value for all layers, or a list of groups [values, repeats]. For
    example, `[[[rotary], 3], [[none], 1]]` means three layers `rotary`, then one layer `none`.

    Args:
        check: A function that checks the value of one layer. It returns the checked value, or
            raises ValueError.
    """

    def checked(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return check(value)
        groups = []
        for group in value:
            if not isinstance(group, list | tuple) or len(group) != 2:
                raise ValueError(f"expected pairs of values and repeats, got {group!r}; {EXAMPLE}")
            values, repeats = group
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"expected a list of values, got {values!r}; write {EXAMPLE}")
            if repeats != ALL and (type(repeats) is not int or repeats < 1):
                raise ValueError(f"expected a number of repeats or all, got {repeats!r}")
            if repeats == ALL and len(value) > 1:
                raise ValueError("all must stand alone: it repeats up to the last layer")
            groups.append((tuple(check(each) for each in values), repeats))
        if not groups:
            raise ValueError(f"expected at least one group of layers; write {EXAMPLE}")
        return tuple(groups)

    return checked


def values_of(value: Any) -> list[Any]:
    """Return the distinct values of the layers, in order of first occurrence.

    Args:
        value: One value for all layers, or a tuple of groups (values, repeats).
    """
    if not isinstance(value, tuple):
        return [value]
    return list(dict.fromkeys(each for values, _ in value for each in values))


def layers_of(value: Any, num_layers: int) -> list[Any]:
    """Return a list with the value of each layer.

    Args:
        value: One value for all layers, or a tuple of groups (values, repeats). The groups must
            define `num_layers` layers in total.
        num_layers: The number of layers.
    """
    if not isinstance(value, tuple):
        return [value] * num_layers
    groups = (list(values) * _times(values, repeats, num_layers) for values, repeats in value)
    return [each for group in groups for each in group]


def problem_of(value: Any, num_layers: int) -> str | None:
    """Return an error text, or None if the groups define exactly `num_layers` layers.

    Args:
        value: One value for all layers, or a tuple of groups (values, repeats).
        num_layers: The number of layers.
    """
    if not isinstance(value, tuple):
        return None
    found = sum(len(values) * _times(values, repeats, num_layers) for values, repeats in value)
    if found == num_layers:
        return None
    return f"names {found} layers, but num_layers is {num_layers}; write repeats that add up to it"


def same_layers(one: Any, other: Any, num_layers: int) -> bool:
    """Return whether two config values assign the same value to each layer.

    The two config values may be grouped differently. For example, `[[[a], 2]]` and `[[[a, a], 1]]`
    both assign `a` to two layers. If the syntax of a config value is wrong or its groups do not
    define `num_layers` layers, return False.
    """
    check = per_layer(lambda each: each)
    try:
        values = [check(one), check(other)]
    except ValueError:
        return False
    if any(problem_of(value, num_layers) for value in values):
        return False
    return layers_of(values[0], num_layers) == layers_of(values[1], num_layers)


def _times(values: tuple[Any, ...], repeats: Any, num_layers: int) -> int:
    """Return how often the values of a group (values, repeats) are repeated.

    If `repeats` is `all`, the values are repeated as often as they fit into `num_layers` layers.
    """
    return num_layers // len(values) if repeats == ALL else repeats
