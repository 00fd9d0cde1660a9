"""Translate a config.json of transformers to our config keys, and back.

The module `classes` lists the supported model classes. The entry `sliding_window` of transformers
is the number of tokens in the window. Our key `sliding_window_width` is the largest distance, which
is smaller by 1. transformers has no `ntk` scaling of rotary embeddings. Another rotary base gives
the same frequencies, so an export contains this other base.

To test whether a class fits a model, the model's config.json for this class is translated back to
our config keys. The class fits if these keys describe the same model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.config import Config
from megatron.config.choices import terms_of
from megatron.config.mlp_width import GATED
from megatron.config.per_layer import layers_of, values_of
from megatron.config.sections.model import ModelConfig
from megatron.engine.errors import HubError
from megatron.engine.model_shape import shape_of
from megatron.hub.classes import CLASSES, TANH, HubClass, class_of

OWN_KEYS, OWN_CLASS = "kerple_neox", "KerpleForCausalLM"
"""The name of the entry of config.json that contains our config keys, and the name of our class."""
_FILELESS = ("ByteLevelTokenizer", "CharLevelTokenizer")
_MODEL_KEYS = [key for key in ModelConfig.model_fields if key != "attention_backend"]
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "intermediate_size")
_SIZES += ("make_vocab_size_divisible_by",)


def keys_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the content of a config.json to our config keys.

    Raises:
        HubError: An entry is missing, has a wrong type, or has no equivalent in this project.
    """
    kind = class_of(found)
    given = {**kind.defaults, **found}
    if given.get("quantization_config"):
        raise HubError("quantization_config: quantised weights cannot be imported")
    for name, wanted in kind.only.items():
        wanted = given.get(wanted) if isinstance(wanted, str) else wanted
        if given.get(name) not in (None, wanted):
            raise HubError(f"{name} is {given[name]!r}; only {wanted!r} can be imported")
    if {*map(str, given.get("layer_types") or ())} - {"full_attention"}:
        raise HubError(f"layer_types is {given['layer_types']!r}; windows of single layers are not")
    keys = dict(kind.keys)
    if given.get("n_inner", 0) is None:
        given["n_inner"] = 4 * _entry(given, "n_embd", int)
    for key, name in kind.entries.items():
        whole = int if key in _SIZES else bool if type(kind.defaults.get(name)) is bool else None
        keys[key] = _entry(given, name, whole) if whole else given.get(name)
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    size = given.get("head_dim") or hidden // heads
    if "head_dim" not in kind.defaults and size != hidden // heads:
        text = f"hidden_size / num_attention_heads, {hidden} / {heads}"
        raise HubError(f"head_dim is {size!r}; in {kind.name} it is always {text}")
    if size != hidden // heads:
        keys["head_dim"] = _entry(given, "head_dim", int)
    if "num_kv_heads" in keys:
        keys["num_kv_heads"] = keys["num_kv_heads"] or heads
    act = str(keys["activation"])
    if act not in kind.activations:
        known = ", ".join(kind.activations)
        raise HubError(f"{kind.entries['activation']} is {act!r}; only {known} can be imported")
    keys["activation"] = kind.activations[act]
    if keys["activation"] == "gelu":
        keys["bias_gelu_fusion"] = act in TANH
    keys["intermediate_size"] *= 3 if keys["activation"] in GATED else 1
    keys["attention_dropout"] = keys["attention_dropout"] or 0.0
    keys["no_weight_tying"] = not _entry(given, "tie_word_embeddings", bool)
    if kind.model_type == "mistral" and given["sliding_window"] is not None:
        keys["sliding_window_width"] = _entry(given, "sliding_window", int) - 1
    if kind.keys.get("pos_emb") == "learned":
        rows = keys["seq_length"] + kind.keys.get("opt_pos_emb_offset", 0)
        return keys | {"max_position_embeddings": rows}
    scaling, base, fraction = _rotary(given, kind)
    rotary = {"rotary_pct": fraction, "rotary_emb_base": base, "rope_scaling": scaling}
    return keys | {"pos_emb": "rotary"} | rotary


def _entry(given: Mapping[str, Any], name: str, kind: type) -> Any:
    value: Any = given.get(name)
    if type(value) is not kind or (kind is int and value < 1):
        what = {int: "a whole number above 0", bool: "true or false"}[kind]
        raise HubError(f"{name} is {value!r}, and must be {what}")
    return value


def _rotary(given: Mapping[str, Any], kind: HubClass) -> tuple[dict[str, Any], Any, Any]:
    """Return our `rope_scaling`, `rotary_emb_base` and `rotary_pct` for the entries `given`."""
    if "rotary_dim" in kind.defaults:
        size, turning = given["n_embd"] // given["n_head"], _entry(given, "rotary_dim", int)
        return {}, 10000.0, turning / size  # GPT-J has no entry for the base
    scaling = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(each, dict) for each in scaling.values()):
        raise HubError("rope_parameters: only one mapping for all layers can be imported")
    scaling = {name: value for name, value in scaling.items() if value is not None}
    # transformers 4 has names of its own for GPTNeoX
    names = ("rotary_emb_base", "rotary_pct") if kind.model_type == "gpt_neox" else ("", "")
    base = given.get(names[0], given["rope_theta"])
    fraction = given.get(names[1], given.get("partial_rotary_factor", 1.0))
    base = scaling.pop("rope_theta", base)
    fraction = scaling.pop("partial_rotary_factor", fraction)
    if "partial_rotary_factor" not in kind.defaults and fraction != 1.0:
        text = f"partial_rotary_factor is {fraction!r}, but {kind.name} rotates whole heads"
        raise HubError(text)
    rope_type = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if rope_type == "default":
        return {}, base, fraction
    if rope_type in ("yarn", "llama3"):
        length = given.get("original_max_position_embeddings")
        length = length or scaling.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = length or given["max_position_embeddings"]
    if rope_type == "yarn":
        _yarn(scaling)
    return {"rope_type": rope_type, **scaling}, base, fraction


def _yarn(scaling: dict[str, Any]) -> None:
    """Replace YaRN's `mscale` and `mscale_all_dim` by `attention_factor`, and remove `truncate`.

    Raises:
        HubError: An entry has a value that is not supported.
    """
    if scaling.pop("truncate", True) is not True:
        raise HubError("rope_parameters: truncate: false has no equivalent here")
    ratio = [scaling.pop(name, 0) for name in ("mscale", "mscale_all_dim")]
    factor: Any = scaling.get("factor")
    if all(ratio) and "attention_factor" not in scaling:
        numbers = (*ratio, factor)
        if not all(isinstance(each, int | float) and 0 < each < 1e6 for each in numbers):
            raise HubError("rope_parameters: mscale, mscale_all_dim or factor is out of range")
        above, below = (0.1 * each * math.log(max(1, factor)) + 1.0 for each in ratio)
        scaling["attention_factor"] = above / below


def misfits(config: Config) -> list[str]:
    """Return the properties of a model that the most suitable class of transformers lacks.

    If a class supports all properties of the model, the result is [].
    """
    return min((_differences(config, kind) for kind in CLASSES), key=len)


def _differences(config: Config, kind: HubClass) -> list[str]:
    """Return the names of the properties of a model that the class `kind` does not support."""
    m = config.model
    if m.activation not in kind.activations.values():
        return [*_computed(config)]
    try:
        keys = keys_of(_described(config, kind) | {"tie_word_embeddings": not m.no_weight_tying})
    except HubError:
        return [*_computed(config)]
    fields = ModelConfig.model_fields.items()
    values = {key: each.get_default(call_default_factory=True) for key, each in fields}
    values |= {"num_kv_heads": m.num_attention_heads, "max_position_embeddings": 1}
    values |= {"head_dim": m.hidden_size // m.num_attention_heads, **keys}
    model = m.model_copy(update=values)
    again = config.model_copy(update={"model": model, "evaluation": type(config.evaluation)()})
    wanted = _computed(again)
    return [name for name, value in _computed(config).items() if wanted[name] != value]


def _computed(config: Config) -> dict[str, Any]:
    """Return the settings that determine the outputs of a model, and the dropout settings."""
    m, shape = config.model, shape_of(config, 1)
    block, [scaling, base] = vars(shape.block).copy(), _rotary_of(m)
    del block["numerics"]
    block["fused_norm"] &= block["norm"] == "rmsnorm"  # the fused layernorm has the same value
    block["tanh_gelu"] &= block["activation"] == "gelu"
    return block | {
        "pos_emb": set(values_of(m.pos_emb)),
        "pos_emb_options": m.pos_emb_options,
        "rope_scaling": scaling,
        "rotary_base": base,
        "sliding_window_width": layers_of(m.sliding_window_width, m.num_layers),
        "reset_attention_mask": m.reset_attention_mask,
        "published_numerics": m.published_numerics,
        "eval_distance_scale": config.evaluation.eval_distance_scale,
        "output_layer_bias": shape.output_bias,
        "position_table": "learned" in terms_of(m.pos_emb)
        and (shape.max_positions, shape.position_offset),
    }


def _rotary_of(m: ModelConfig) -> tuple[dict[str, Any], float]:
    """Return the `rope_scaling` and the rotary base that config.json must contain for a model."""
    scaling, base = dict(m.rope_scaling), m.rotary_emb_base
    if scaling.get("rope_type") == "ntk":
        turning = int(m.head_dim * m.rotary_pct)
        return {}, base * scaling["factor"] ** (turning / max(1, turning - 2))
    if scaling.get("rope_type") == "llama3":
        scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | scaling
    return scaling, base


def hub_config(config: Config) -> tuple[HubClass, dict[str, Any]]:
    """Return the class of transformers that fits a model, and the content of the config.json.

    Call this function only if `misfits` returns [] for the model.
    """
    kind = next(kind for kind in CLASSES if not _differences(config, kind))
    return kind, _described(config, kind)


def _described(config: Config, kind: HubClass) -> dict[str, Any]:
    """Return the content of a model's config.json for the class `kind`, without special tokens."""
    m, [scaling, base] = config.model, _rotary_of(config.model)
    act = next(act for act, ours in kind.activations.items() if ours == m.activation)
    if act == "gelu" and m.bias_gelu_fusion and TANH[0] in kind.activations:
        usual = kind.defaults[kind.entries["activation"]]
        act = usual if usual in TANH else TANH[0]
    values = {"activation": act, "intermediate_size": m.inner_width}
    rows = m.max_position_embeddings or m.seq_length
    values["seq_length"] = max(rows, m.seq_length)
    if "learned" in terms_of(m.pos_emb):
        values["seq_length"] = max(1, rows - m.opt_pos_emb_offset)
    found = {
        "model_type": kind.model_type,
        "architectures": [kind.name],
        "initializer_range": m.init_method_std,
        "bos_token_id": None,
        "pad_token_id": None,  # a class whose default is a token would never train its vector
        **{name: values.get(key, getattr(m, key)) for key, name in kind.entries.items()},
    }
    if "rope_theta" in kind.defaults:
        # transformers 4 and transformers 5 have different names for the rotary settings.
        rotary = {"rope_type": "default", "rope_theta": base} | scaling
        found |= {"rope_theta": base, "rope_scaling": scaling or None, "rope_parameters": rotary}
    if "partial_rotary_factor" in kind.defaults:
        found["partial_rotary_factor"] = m.rotary_pct
        found["rope_parameters"]["partial_rotary_factor"] = m.rotary_pct
    if kind.model_type == "gpt_neox":
        found |= {"rotary_pct": m.rotary_pct, "rotary_emb_base": base}
    if "resid_pdrop" in kind.defaults:
        found["embd_pdrop"] = m.hidden_dropout  # here, it is also the embedding's
    if "rotary_dim" in kind.defaults:
        found["rotary_dim"] = int(m.head_dim * m.rotary_pct) or 1
    if "head_dim" in kind.defaults:  # a config.json of Qwen3 without it means 128
        found["head_dim"] = m.head_dim
    if kind.model_type == "mistral":
        [window, *_] = layers_of(m.sliding_window_width, m.num_layers)
        found["sliding_window"] = None if window is None else window + 1
    return found


def own_keys(config: Config) -> dict[str, Any]:
    """Return our config keys that describe the model, with their values.

    The key `tokenizer_type` is included if the tokenizer needs no file.
    """
    flat = config.to_flat_dict()
    keys = {key: flat[key] for key in _MODEL_KEYS if key in flat}
    if config.data.tokenizer_type in _FILELESS:
        keys["tokenizer_type"] = config.data.tokenizer_type
    return keys


def keys_of_export(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return our config keys from the content of an export's config.json.

    Raises:
        HubError: The file does not contain our config keys, because an earlier version of this
            project wrote it.
    """
    given = found.get(OWN_KEYS)
    if not isinstance(given, dict):
        raise HubError(f"{OWN_KEYS} is missing, so it cannot be imported; export the run again")
    keys = {key: given[key] for key in _MODEL_KEYS if key in given}
    keys["eval_distance_scale"] = found.get("distance_scale", 1.0)
    return keys | {"make_vocab_size_divisible_by": _entry(found, "vocab_size", int)}


def fileless_tokenizer(found: Mapping[str, Any]) -> str | None:
    """Return the tokenizer type of an export, or None if the tokenizer needs a file.

    Args:
        found: The content of the export's config.json.
    """
    given = found.get(OWN_KEYS)
    name = given.get("tokenizer_type") if isinstance(given, dict) else None
    return name if name in _FILELESS else None
