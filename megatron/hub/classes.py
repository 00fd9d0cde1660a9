"""List transformers' classes that compute what a model of ours computes.

Each class is one table in classes.yml: the names of its modules, the names of its config.json's
entries, and the config keys that have the same value in all of its models. The module `weights`
converts the weights, and the module `config_keys` translates the entries of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.engine.errors import HubError

TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")


@dataclass(frozen=True)
class HubClass:
    """The description of a model class of the library `transformers`.

    "Ours" means this project. "Entries" are those of the model's config.json.

    Attributes:
        name: The name of the class.
        model_type: The value of the entry `model_type`.
        layers: The prefix of the names of the layers.
        activations: Our `activation` for each value of the entry `hidden_act`.
        keys: Our config keys that have the same value in every model of the class.
        entries: The entry for each of our other config keys.
        modules: The names of modules in transformers for each of ours that differs.
        defaults: The values of entries that a config.json may leave out.
        only: The only supported value of some entries, or the name of the entry that has it.
        transposed: Whether the layers' matrices are stored transposed, as in GPT-2.
    """

    name: str
    model_type: str
    layers: str
    activations: dict[str, str]
    keys: dict[str, Any]
    entries: dict[str, str]
    # If several modules correspond to one of ours, their names are separated by spaces.
    modules: dict[str, str]
    # `partial_rotary_factor` or `rotary_dim` is there if the class supports partly rotated heads,
    # and `head_dim` if it supports heads of any size.
    defaults: dict[str, Any]
    only: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False


_TABLES = yaml.safe_load(Path(__file__).with_name("classes.yml").read_text(encoding="utf-8"))
CLASSES = tuple(HubClass(**table) for table in _TABLES["classes"])


def class_of(found: Mapping[str, Any]) -> HubClass:
    """Return the class that the content of a config.json names.

    Raises:
        HubError: This project does not support the class.
    """
    classes, model_type = found.get("architectures"), found.get("model_type")
    kind = next((each for each in CLASSES if each.model_type == model_type), None)
    if kind is None or classes not in (None, [], [kind.name]):
        named, known = classes or model_type, ", ".join(each.name for each in CLASSES)
        raise HubError(f"its class is {named!r}; only {known} can be imported")
    return kind
