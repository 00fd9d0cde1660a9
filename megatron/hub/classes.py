"""List transformers' classes that compute what a model of ours computes.

| transformers | here |
|---|---|
| GPTNeoX | `layernorm`, no gate in the MLP |
| Llama | `rmsnorm` with epsilon inside the root (`rmsnorm_fusion: true`), a gate in the MLP |
| Mistral | the same with a sliding window, without biases |

All three have rotary embeddings. The module `weights` converts their weights, and the module
`config_keys` translates the entries of their config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.engine.errors import HubError

TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
_PLAIN = {"gelu": "gelu", "relu": "relu", "silu": "swish", "mish": "mish", "swish": "swish"}
_PLAIN |= dict.fromkeys(TANH, "gelu")
_GATES = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu"}
_GATES |= {"linear": "bilinear", "swish": "swiglu"}
_COMMON = {"tie_word_embeddings": False, "attention_dropout": 0.0, "rope_theta": 10000.0}


@dataclass(frozen=True)
class HubClass:
    """The description of a model class of the library `transformers`.

    Attributes:
        name: The name of the class, as in the entry `architectures` of config.json.
        model_type: The value of `model_type` in config.json.
        activations: Maps values of `hidden_act` to values of our `activation`.
        defaults: The values of entries that a config.json may leave out.
        modules: Maps names of our modules to the names of their equivalents in transformers. A
            module that has the same name in transformers is left out.
        layers: The prefix of the names of the layers in transformers.
    """

    name: str
    model_type: str
    activations: Mapping[str, str]
    defaults: dict[str, Any]
    modules: Mapping[str, tuple[str, ...]]
    layers: str


NEOX = HubClass(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    _PLAIN,
    _COMMON
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout": 0.0, "attention_bias": True}
    | {"use_parallel_residual": True, "max_position_embeddings": 2048},
    {
        "embedding.word_embeddings": ("gpt_neox.embed_in",),
        "final_norm": ("gpt_neox.final_layer_norm",),
        "output": ("embed_out",),  # transformers 5 reads and writes this name, too
    },
    "gpt_neox.layers.",
)
LLAMA = HubClass(
    "LlamaForCausalLM",
    "llama",
    _GATES,
    _COMMON
    | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": None}
    | {"attention_bias": False, "mlp_bias": False, "sliding_window": None}
    | {"max_position_embeddings": 2048},
    {
        "embedding.word_embeddings": ("model.embed_tokens",),
        "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",),
        "mlp.dense_h_to_4h": ("mlp.up_proj", "mlp.gate_proj"),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
        "final_norm": ("model.norm",),
        "output": ("lm_head",),
    },
    "model.layers.",
)
MISTRAL = replace(
    LLAMA,
    name="MistralForCausalLM",
    model_type="mistral",
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
CLASSES = (NEOX, LLAMA, MISTRAL)


def class_of(found: Mapping[str, Any]) -> HubClass:
    """Return the class that a config.json with the content `found` names.

    Raises:
        HubError: The config.json names a class that is not in `CLASSES`.
    """
    by_type = {each.model_type: each for each in CLASSES}
    named = found.get("architectures") or found.get("model_type")
    kind = by_type.get(str(found.get("model_type")))
    if kind is None or found.get("architectures") not in (None, [], [kind.name]):
        known = ", ".join(each.name for each in CLASSES)
        raise HubError(f"its class is {named!r}; only {known} can be imported")
    return kind
