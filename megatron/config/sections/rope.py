"""Define the config field `rope_scaling`, with entries named as in Hugging Face's transformers."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from megatron.config.fields import FrozenDict, number, one_of, whole_number, wrong

_LENGTH = "original_max_position_embeddings"
_factor = number(1, write="e.g. 4.0")
_positive = number(0, above=True, write="e.g. 1.0")
_length = whole_number(7, write="the length of the first training, e.g. 2048")
_NEEDED = {"linear": {}, "ntk": {}, "yarn": {_LENGTH: _length}, "llama3": {_LENGTH: _length}}
_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
_kind = one_of(
    _NEEDED,
    refused={
        "dynamic": "its angles change with the length of the text; ntk keeps them",
        "longrope": "not built",
    },
)


def rope_scaling(value: Any) -> FrozenDict:
    """Check the value of `rope_scaling`, for example `{rope_type: yarn, factor: 4.0}`.

    Raises:
        ValueError: The value is not a mapping, or an entry is wrong, unknown or missing.
    """
    if not isinstance(value, Mapping):
        raise wrong("a mapping", value, "e.g. {rope_type: ntk, factor: 4.0}")
    given = dict(value)
    if given in ({}, {"rope_type": "default"}, {"type": "default"}):
        return FrozenDict()
    kind = _kind(given.pop("rope_type", given.pop("type", None)))
    needed = {"factor": _factor, **_NEEDED[kind]}
    checks = needed | dict.fromkeys(_OPTIONAL.get(kind, ()), _positive)
    for name in [*given, *needed]:
        if name not in checks:
            raise ValueError(f"{kind} has no {name}; write {', '.join(checks)}")
        if name not in given:
            example = 4.0 if name == "factor" else 2048
            raise ValueError(f"{kind} needs {name}; write e.g. {name}: {example}")
    checked = {"rope_type": kind}
    for name, each in given.items():
        try:
            checked[name] = checks[name](each)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if checked.get("low_freq_factor", 1.0) >= checked.get("high_freq_factor", 4.0):
        raise ValueError("low_freq_factor is not below high_freq_factor; write e.g. 1.0 and 4.0")
    if checked.get("beta_slow", 1.0) >= checked.get("beta_fast", 32.0):
        raise ValueError("beta_slow is not below beta_fast; write e.g. 1.0 and 32.0")
    return FrozenDict(checked)


RopeScaling = Annotated[dict[str, Any], BeforeValidator(rope_scaling)]
