"""List the model classes of `transformers` that can compute the same function as our models.

The file classes.yml has one table for each class. The table maps the names of our modules and
config keys to the names in transformers. The module `weights` uses the table to convert weights,
and the module `config_keys` uses it to translate config.json. The function `shape_values` describes
a model for our own class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.config import Config
from megatron.config.per_layer import layers_of
from megatron.engine.errors import HubError
from megatron.model.shape import GPTShape

# The values of a `BlockShape` that `KerpleConfig` has under the same names.
_SAME = ("hidden_size", "norm_eps", "qk_norm", "activation", "tanh_gelu", "attention_bias")
_SAME += ("output_gate", "mlp_bias", "gpt_j_residual", "rotary_ndims", "rotary_base", "head_size")
_SAME += ("qk_norm_kind", "output_norms", "qkv_bias", "gpt_j_tied")
TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")


@dataclass(frozen=True)
class HubClass:
    """The description of a model class of the library `transformers`.

    An entry is a name with a value in the model's config.json. "Our" refers to this project.

    Attributes:
        name: The name of the class.
        model_type: The value of the entry `model_type`.
        layers: The text before the number of the layer in the name of a weight.
        activations: Maps the name of an activation in config.json to our `activation`.
        keys: Maps each of our config keys that has the same value in every model of the class to
            this value.
        entries: Maps each of our config keys that has an equivalent entry to the name of the entry.
        modules: Maps the name of each of our modules that has another name in transformers to
            that name.
        defaults: The value of each entry that a config.json may omit.
        only: Maps the name of each entry with only one supported value to this value. If the value
            is a string, it is the name of another entry, and both entries must be equal.
        transposed: Whether the matrices of the layers are stored transposed, as in GPT-2.
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
    """Return the description of the model class that a config.json names.

    Args:
        found: The content of the config.json.

    Raises:
        HubError: This project does not support the class.
    """
    classes, model_type = found.get("architectures"), found.get("model_type")
    kind = next((each for each in CLASSES if each.model_type == model_type), None)
    if kind is None or classes not in (None, [], [kind.name]):
        named, known = classes or model_type, ", ".join(each.name for each in CLASSES)
        raise HubError(f"its class is {named!r}; only {known} can be imported")
    return kind


def shape_values(config: Config, shape: GPTShape) -> dict[str, Any]:
    """Return the arguments of `KerpleConfig` that follow from the shape and the model's config."""
    m, block, windows = config.model, shape.block, config.model.sliding_window_width
    inside = block.norm == "rmsnorm" and block.fused_norm
    return {name: getattr(block, name) for name in _SAME} | {
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_heads // block.group,
        "intermediate_size": block.mlp_size,
        "norm": "fused_rmsnorm" if inside else block.norm,
        "pos_emb": layers_of(m.pos_emb, m.num_layers),
        "theta_per_layer": m.theta_per_layer,
        "windows": None if windows is None else layers_of(windows, shape.num_layers),
        "position_offset": shape.position_offset,
        "output_bias": shape.output_bias,
    }
