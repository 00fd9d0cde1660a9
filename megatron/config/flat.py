"""Convert a config to a dict or a YAML text with GPT-NeoX's keys.

Checkpoints and run folders store configs in this form.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from megatron.config.fields import key_of
from megatron.config.reader import scalar

# The number of accumulation steps is not stored, because it follows from the other batch sizes. A
# run that continues on another number of processes thus keeps its train_batch_size.
_FOLLOWS = {"gradient_accumulation_steps"}


def to_flat_dict(sections: Iterable[BaseModel]) -> dict[str, Any]:
    """Return the fields of all sections in one dict, with keys as in GPT-NeoX's configs.

    A dotted key such as `optimizer.type` becomes nested dicts. Fields whose value is None are left
    out.
    """
    flat: dict[str, Any] = {}
    for section in sections:
        for name in type(section).model_fields:
            key, value = key_of(type(section), name), getattr(section, name)
            if key is None or value is None or name in _FOLLOWS:
                continue
            *groups, leaf = key.split(".")
            inner = flat
            for group in groups:
                inner = inner.setdefault(group, {})
            if isinstance(value, Mapping):
                inner.setdefault(leaf, {}).update(value)
            else:
                inner[leaf] = list(value) if isinstance(value, tuple) else value
    # The precision is read from `precision`; the fp16 mapping holds only the loss-scaling values.
    flat["fp16"]["enabled"] = flat["precision"] == "fp16"
    if flat["precision"] == "bf16":
        flat["precision"] = "bfloat16"
    return flat


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes texts such as '6e-4', which look like values of another type."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if scalar(text) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def to_yaml(flat: Mapping[str, Any]) -> str:
    """Return a config as the text of a YAML file.

    Args:
        flat: The config as a dict of GPT-NeoX's keys, as `to_flat_dict` returns it.
    """
    return yaml.dump(dict(flat), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
