"""Define the config fields of theta, the learned parameters of the positional embedding.

`megatron.config` does not import torch, so it cannot check which parameters an embedding has.
`megatron.engine.build` therefore checks the names and bounds of the parameters.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from megatron.config.fields import FrozenDict, is_number, texts, wrong


def _start_values(value: Any) -> dict[str, float | tuple[float, ...]]:
    """Check `theta_init`, the initial values of parameters.

    It maps the name of each parameter to one number, or to a list with one number per head.
    """
    write = (
        "e.g. {bias_p: 1.0, bias_a: [0.1, 0.2]}, with one number per head; "
        "in a sum of embeddings, e.g. {kerple_log.bias_p: 1.0}"
    )
    if not isinstance(value, Mapping):
        raise wrong("a mapping from parameters to numbers", value, write)
    checked = {}
    for name, given in value.items():
        numbers = given if isinstance(given, list | tuple) else [given]
        if not numbers or not all(is_number(x) and math.isfinite(x) for x in numbers):
            raise wrong(f"numbers for {name}", given, write)
        floats = tuple(map(float, numbers))
        checked[str(name)] = floats if isinstance(given, list | tuple) else floats[0]
    return FrozenDict(checked)


_names = texts("true, false or a list of parameters", "e.g. true or [bias_p]")


def _frozen(value: Any) -> bool | tuple[str, ...]:
    """Check `theta_frozen`, which is true, false, or a list of parameter names."""
    return value if isinstance(value, bool) else tuple(sorted(set(_names(value))))


ThetaInit = Annotated[dict[str, Any], BeforeValidator(_start_values)]
ThetaFrozen = Annotated[bool | tuple[str, ...], BeforeValidator(_frozen)]
