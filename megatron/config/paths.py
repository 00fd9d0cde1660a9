"""Define the config field types for paths of tokenized data files and for their sampling weights.

A path is a prefix (the file's path without `.bin` or `.idx`) or a glob that matches prefixes.
"""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from megatron.config.fields import is_number, show, texts, wrong

_path_list = texts("a list of paths", "e.g. [data/a, data/b]")


def _paths(value: Any) -> str | tuple[str, ...]:
    """Check one path or a list of paths, and return the checked value.

    One path, or a list with one path, is returned as a str. Several paths are returned as a tuple.
    """
    paths = _path_list(value)
    if not paths:
        raise ValueError("an empty list names no data; write a shard prefix")
    return paths[0] if len(paths) == 1 else paths


def _weights(value: Any) -> tuple[float, ...]:
    write = "one number >= 0 for each path, not all zero, e.g. [0.7, 0.3]"
    if not isinstance(value, (list, tuple)):
        raise wrong("a list of weights", value, write)
    for weight in value:
        if not is_number(weight) or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"got the weight {show(weight)}; write {write}")
    if value and not sum(value) > 0:
        raise ValueError(f"got {list(value)}; write {write}")
    return tuple(float(weight) for weight in value)


Paths = Annotated[str | tuple[str, ...], BeforeValidator(_paths)]
PathList = Annotated[tuple[str, ...], BeforeValidator(_path_list)]
Weights = Annotated[tuple[float, ...], BeforeValidator(_weights)]
