"""Translate config.json of transformers' GPTNeoX, Llama and Mistral to our config keys, and back.

A `sliding_window` W of transformers is a `sliding_window_width` W - 1 of ours: the first counts the
tokens in the window, and the second is the largest distance. transformers has no `ntk` scaling. The
same frequencies result from another base, so an export contains that base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.config import Config
from megatron.config.mlp_width import GATED
from megatron.config.per_layer import layers_of, values_of
from megatron.config.sections.model import ModelConfig
from megatron.engine.errors import HubError
from megatron.hub.classes import LLAMA, MISTRAL, NEOX, TANH, HubClass, class_of

OWN_KEYS, OWN_CLASS = "kerple_neox", "KerpleForCausalLM"
"""The entry of config.json that holds our config keys; the name of the class that we export."""
_FILELESS = ("ByteLevelTokenizer", "CharLevelTokenizer")
_MODEL_KEYS = [key for key in ModelConfig.model_fields if key != "attention_backend"]
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def keys_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a config.json of one of `CLASSES` to our config keys.

    Raises:
        HubError: An entry is missing, has a wrong type, or has no equivalent here.
    """
    kind = class_of(found)
    given = {**kind.defaults, **found}
    if given.get("quantization_config"):
        raise HubError("quantization_config: quantised weights cannot be imported")
    *_, heads = sizes = [_entry(given, name, int) for name in _SIZES]
    if given.get("head_dim") not in (None, sizes[1] // max(1, heads)):
        text = f"hidden_size / num_attention_heads, {sizes[1]} / {heads}"
        raise HubError(f"head_dim is {given['head_dim']!r}; here it is always {text}")
    act, gated = str(given["hidden_act"]), kind is not NEOX
    if act not in kind.activations:
        known = ", ".join(kind.activations)
        raise HubError(f"hidden_act is {act!r}; only {known} can be imported")
    scaling, base, fraction = _rotary(given, kind)
    keys = {
        "num_layers": sizes[2],
        "hidden_size": sizes[1],
        "num_attention_heads": heads,
        "seq_length": _entry(given, "max_position_embeddings", int),
        "pos_emb": "rotary",
        "rotary_pct": fraction,
        "rotary_emb_base": base,
        "rope_scaling": scaling,
        "activation": kind.activations[act],
        "intermediate_size": _entry(given, "intermediate_size", int) * (3 if gated else 1),
        "use_bias_in_attn_linear": _entry(given, "attention_bias", bool),
        "attention_dropout": given["attention_dropout"] or 0.0,
        "no_weight_tying": not _entry(given, "tie_word_embeddings", bool),
        "make_vocab_size_divisible_by": sizes[0],
    }
    if kind is NEOX:
        keys |= {"norm": "layernorm", "layernorm_epsilon": given["layer_norm_eps"]}
        keys |= {"gpt_j_residual": _entry(given, "use_parallel_residual", bool)}
        return keys | {"hidden_dropout": given["hidden_dropout"], "bias_gelu_fusion": act in TANH}
    keys |= {"norm": "rmsnorm", "rms_norm_epsilon": given["rms_norm_eps"], "rmsnorm_fusion": True}
    keys |= {"num_kv_heads": given["num_key_value_heads"] or heads}
    if kind is LLAMA:
        return keys | {"use_bias_in_mlp": _entry(given, "mlp_bias", bool)}
    keys |= {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    if given["sliding_window"] is not None:
        keys["sliding_window_width"] = _entry(given, "sliding_window", int) - 1
    return keys


def _entry(given: Mapping[str, Any], name: str, kind: type) -> Any:
    value: Any = given.get(name)
    if type(value) is not kind or (kind is int and value < 1):
        what = {int: "a whole number above 0", bool: "true or false"}[kind]
        raise HubError(f"{name} is {value!r}, and must be {what}")
    return value


def _rotary(given: Mapping[str, Any], kind: HubClass) -> tuple[dict[str, Any], Any, Any]:
    """Translate the entries of a config.json for rotary embeddings to our config keys.

    Return the values of `rope_scaling`, `rotary_emb_base` and `rotary_pct`.

    Args:
        given: The content of config.json.
        kind: The class that config.json names.
    """
    scaling = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(each, dict) for each in scaling.values()):
        raise HubError("rope_parameters: only one mapping for all layers can be imported")
    scaling = {name: value for name, value in scaling.items() if value is not None}
    neox = kind is NEOX
    base = given["rotary_emb_base"] if neox and "rotary_emb_base" in given else given["rope_theta"]
    base = scaling.pop("rope_theta", base)
    default = given.get("rotary_pct", 0.25) if neox else given.get("partial_rotary_factor", 1.0)
    fraction = scaling.pop("partial_rotary_factor", default)
    if not neox and fraction != 1.0:
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
    """Replace in `scaling` the entries of YaRN that do not exist in our `rope_scaling`.

    `mscale` and `mscale_all_dim` become one `attention_factor`. `truncate` is removed.

    Raises:
        HubError: `truncate` is false, or one of the numbers is out of range.
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
    """Return why no class in `CLASSES` can compute the config's model; [] if some class can."""
    m, windows = config.model, _windows(config)
    found = {
        f"pos_emb: {m.pos_emb}": set(values_of(m.pos_emb)) != {"rotary"},
        "pos_emb_options": m.pos_emb_options,
        "eval_distance_scale": config.evaluation.eval_distance_scale != 1.0,
        "reset_attention_mask": m.reset_attention_mask,
        "published_numerics": m.published_numerics,
        "use_qk_layernorm": m.use_qk_layernorm,
        "attention_output_gate": m.attention_output_gate,
        f"norm: {m.norm}": m.norm == "scalenorm",
        "sliding_window_width of single layers": len(windows) > 1,
    }
    gated = m.activation in GATED
    if m.norm == "layernorm":
        found |= {
            f"norm: layernorm with activation: {m.activation}": m.activation
            not in NEOX.activations.values(),
            "norm: layernorm with num_kv_heads": m.num_kv_heads != m.num_attention_heads,
            "norm: layernorm with sliding_window_width": windows != {None},
            "norm: layernorm with use_bias_in_mlp: false": not m.use_bias_in_mlp,
        }
    else:
        biases = m.use_bias_in_attn_linear or m.use_bias_in_mlp
        found |= {
            "rmsnorm_fusion: false (epsilon outside of the root)": not m.rmsnorm_fusion,
            f"norm: rmsnorm with activation: {m.activation}": not gated,
            "norm: rmsnorm with gpt_j_residual": m.gpt_j_residual,
            "norm: rmsnorm with rotary_pct": m.rotary_pct != 1.0,
            "norm: rmsnorm with hidden_dropout": m.hidden_dropout,
            "sliding_window_width with biases": windows != {None} and biases,
        }
    return [name for name, differs in found.items() if differs]


def _windows(config: Config) -> set[int | None]:
    return set(layers_of(config.model.sliding_window_width, config.model.num_layers))


def hub_config(config: Config) -> tuple[HubClass, dict[str, Any]]:
    """Return the class of transformers for the config's model, and the content of its config.json.

    Call this function only if `misfits` returns [].
    """
    m, windows = config.model, _windows(config)
    kind = LLAMA if windows == {None} else MISTRAL
    if m.norm == "layernorm":
        kind = NEOX
    act = next(act for act, ours in kind.activations.items() if ours == m.activation)
    scaling, base = dict(m.rope_scaling), m.rotary_emb_base
    if scaling.get("rope_type") == "ntk":
        turning = int(m.hidden_size // m.num_attention_heads * m.rotary_pct)
        base, scaling = base * scaling["factor"] ** (turning / max(1, turning - 2)), {}
    if scaling.get("rope_type") == "llama3":
        scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | scaling
    found = {
        "model_type": kind.model_type,
        "architectures": [kind.name],
        "hidden_size": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "intermediate_size": m.inner_width,
        "hidden_act": TANH[0] if act == "gelu" and m.bias_gelu_fusion and kind is NEOX else act,
        "max_position_embeddings": m.seq_length,
        "initializer_range": m.init_method_std,
        "bos_token_id": None,
        "attention_dropout": m.attention_dropout,
        # transformers 4 and transformers 5 have different names for the rotary settings.
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": base} | scaling,
    }
    if kind is NEOX:
        found["rope_parameters"]["partial_rotary_factor"] = m.rotary_pct
        found |= {"rotary_pct": m.rotary_pct, "rotary_emb_base": base}
        found |= {"layer_norm_eps": m.layernorm_epsilon, "hidden_dropout": m.hidden_dropout}
        found |= {"use_parallel_residual": m.gpt_j_residual}
        return kind, found | {"attention_bias": m.use_bias_in_attn_linear}
    found |= {"rope_theta": base, "rms_norm_eps": m.rms_norm_epsilon}
    found |= {"num_key_value_heads": m.num_kv_heads}
    if kind is LLAMA:
        biases = {"attention_bias": m.use_bias_in_attn_linear, "mlp_bias": m.use_bias_in_mlp}
        return kind, found | biases
    [window] = windows
    return kind, found | {"sliding_window": (window or 0) + 1}


def own_keys(config: Config) -> dict[str, Any]:
    """Return the config keys that describe the model, with their values.

    The key `tokenizer_type` is included if the tokenizer needs no file.
    """
    flat = config.to_flat_dict()
    keys = {key: flat[key] for key in _MODEL_KEYS if key in flat}
    if config.data.tokenizer_type in _FILELESS:
        keys["tokenizer_type"] = config.data.tokenizer_type
    return keys


def keys_of_export(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return our config keys of the model, read from the config.json of an export.

    Args:
        found: The content of config.json.

    Raises:
        HubError: The file has no such keys, because an earlier version of this project wrote it.
    """
    given = found.get(OWN_KEYS)
    if not isinstance(given, dict):
        raise HubError(f"{OWN_KEYS} is missing, so it cannot be imported; export the run again")
    keys = {key: given[key] for key in _MODEL_KEYS if key in given}
    return keys | {"make_vocab_size_divisible_by": _entry(found, "vocab_size", int)}


def fileless_tokenizer(found: Mapping[str, Any]) -> str | None:
    """Return the `tokenizer_type` of an export if this tokenizer needs no file, otherwise None.

    Args:
        found: The content of the export's config.json.
    """
    given = found.get(OWN_KEYS)
    name = given.get("tokenizer_type") if isinstance(given, dict) else None
    return name if name in _FILELESS else None
