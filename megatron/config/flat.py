"""A configuration as flat GPT-NeoX keys: the form that checkpoints and run folders keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from megatron.config.fields import key_of
from megatron.config.reader import scalar

# Follows from the other batch sizes. The flat form leaves it out, so that a run on another number
# of processes keeps its train_batch_size.
_FOLLOWS = {"gradient_accumulation_steps"}


def to_flat_dict(sections: Iterable[BaseModel]) -> dict[str, Any]:
    """Flat NeoX keys (nested where NeoX nests); fields that are None are left out."""
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
    # `precision` decides; the fp16 mapping carries only the loss-scaling values.
    flat["fp16"]["enabled"] = flat["precision"] == "fp16"
    if flat["precision"] == "bf16":
        flat["precision"] = "bfloat16"
    return flat


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader, unlike PyYAML's, would read as a number or null."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if scalar(text) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def to_yaml(flat: Mapping[str, Any]) -> str:
    """The flat form as the text of a YAML file."""
    return yaml.dump(dict(flat), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
