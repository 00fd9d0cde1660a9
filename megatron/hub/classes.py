"""List transformers' classes that compute what a model of ours computes.

Each class is one table: the names of its modules, the names of its config.json's entries, and the
config keys that have the same value in all of its models. The module `weights` converts the
weights, and the module `config_keys` translates the entries of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.engine.errors import HubError

TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
_PLAIN = {"gelu": "gelu", "relu": "relu", "silu": "swish", "mish": "mish", "swish": "swish"}
_PLAIN |= dict.fromkeys(TANH, "gelu")
_GATES = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu"}
_GATES |= {"linear": "bilinear", "swish": "swiglu"}
_COMMON = {"tie_word_embeddings": False, "attention_dropout": 0.0, "rope_theta": 10000.0}
_ENTRIES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "seq_length": "max_position_embeddings",
    "activation": "hidden_act",
    "intermediate_size": "intermediate_size",
    "attention_dropout": "attention_dropout",
    "make_vocab_size_divisible_by": "vocab_size",
}
_RMSNORM = {"norm": "rmsnorm", "rmsnorm_fusion": True}
_GROUPED = _ENTRIES | {"num_kv_heads": "num_key_value_heads"}
_LAYERNORM = {"layernorm_epsilon": "layer_norm_eps"}


@dataclass(frozen=True)
class HubClass:
    """The description of a model class of the library `transformers`.

    Attributes:
        name: The name of the class, as in the entry `architectures` of config.json.
        model_type: The value of `model_type` in config.json.
        activations: Maps values of `hidden_act` to values of our `activation`.
        defaults: The values of entries that a config.json may leave out. A class whose heads may
            rotate in part has `partial_rotary_factor` or `rotary_dim`, and one whose heads may have
            any size has `head_dim`.
        modules: Maps names of our modules to the names of their equivalents in transformers. A
            module that has the same name in transformers is left out.
        layers: The prefix of the names of the layers in transformers.
        keys: The config keys of ours that have the same value in every model of the class.
        entries: Maps config keys of ours to the entries of config.json that have their values.
        only: Maps entries of config.json to the only value that can be imported, or to the name of
            the entry that has this value.
        transposed: Whether the matrices of the layers are stored transposed, and those of queries,
            keys and values as one, one after the other.
    """

    name: str
    model_type: str
    activations: Mapping[str, str]
    defaults: dict[str, Any]
    modules: Mapping[str, tuple[str, ...]]
    layers: str
    keys: Mapping[str, Any]
    entries: Mapping[str, str]
    only: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False


NEOX = HubClass(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    _PLAIN,
    _COMMON
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout": 0.0, "attention_bias": True}
    | {"use_parallel_residual": True, "max_position_embeddings": 2048}
    | {"partial_rotary_factor": 0.25},
    {
        "embedding.word_embeddings": ("gpt_neox.embed_in",),
        "final_norm": ("gpt_neox.final_layer_norm",),
        "output": ("embed_out",),  # transformers 5 reads and writes this name, too
    },
    "gpt_neox.layers.",
    {"norm": "layernorm"},
    _ENTRIES
    | _LAYERNORM
    | {"hidden_dropout": "hidden_dropout", "use_bias_in_attn_linear": "attention_bias"}
    | {"gpt_j_residual": "use_parallel_residual"},
)
LLAMA = HubClass(
    "LlamaForCausalLM",
    "llama",
    _GATES,
    _COMMON
    | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": None}
    | {"attention_bias": False, "mlp_bias": False, "sliding_window": None, "head_dim": None}
    | {"max_position_embeddings": 2048},
    {
        "embedding.word_embeddings": ("model.embed_tokens",),
        "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.query_norm": ("self_attn.q_norm",),
        "attention.key_norm": ("self_attn.k_norm",),
        "attention.dense": ("self_attn.o_proj",),
        "mlp.dense_h_to_4h": ("mlp.up_proj", "mlp.gate_proj"),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
        "post_mlp_layernorm": ("post_feedforward_layernorm",),
        "final_norm": ("model.norm",),
        "output": ("lm_head",),
    },
    "model.layers.",
    _RMSNORM,
    _GROUPED
    | {"rms_norm_epsilon": "rms_norm_eps", "use_bias_in_attn_linear": "attention_bias"}
    | {"use_bias_in_mlp": "mlp_bias"},
)
_NO_BIASES = _RMSNORM | {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
MISTRAL = replace(
    LLAMA,
    name="MistralForCausalLM",
    model_type="mistral",
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    keys=_NO_BIASES,
    entries=_GROUPED | {"rms_norm_epsilon": "rms_norm_eps"},
)
QWEN2 = replace(
    MISTRAL,
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults=LLAMA.defaults | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    keys=_NO_BIASES | {"add_qkv_bias": True},
    only={"use_sliding_window": False},
)
_QK_NORM = _RMSNORM | {"use_qk_layernorm": True, "use_bias_in_mlp": False}
QWEN3 = replace(
    QWEN2,
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults=QWEN2.defaults | {"head_dim": 128},
    keys=_QK_NORM | {"qk_layernorm_kind": "shared"},
    entries=MISTRAL.entries | {"use_bias_in_attn_linear": "attention_bias"},
)
OLMO2 = replace(
    QWEN3,
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    defaults=LLAMA.defaults | {"rms_norm_eps": 1e-5},
    keys=_QK_NORM | {"qk_layernorm_kind": "joined", "output_norms": True},
    only={},
)
STABLELM = HubClass(
    "StableLmForCausalLM",
    "stablelm",
    _GATES,
    _COMMON
    | {"hidden_act": "silu", "layer_norm_eps": 1e-5, "num_key_value_heads": 32}
    | {"use_qkv_bias": False, "use_parallel_residual": False, "partial_rotary_factor": 0.25}
    | {"max_position_embeddings": 4096},
    LLAMA.modules,
    LLAMA.layers,
    {"norm": "layernorm", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False},
    _GROUPED
    | _LAYERNORM
    | {"add_qkv_bias": "use_qkv_bias", "gpt_j_residual": "use_parallel_residual"}
    | {"gpt_j_tied": "use_parallel_residual"},
    only={"qk_layernorm": False, "hidden_dropout": 0.0},
)
_ONE_NORM = {"norm": "layernorm", "gpt_j_residual": True, "gpt_j_tied": True}
PHI = HubClass(
    "PhiForCausalLM",
    "phi",
    _PLAIN,
    _COMMON
    | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "num_key_value_heads": None}
    | {"resid_pdrop": 0.0, "partial_rotary_factor": 0.5, "head_dim": None}
    | {"max_position_embeddings": 2048},
    LLAMA.modules
    | {
        "attention.dense": ("self_attn.dense",),
        "mlp.dense_h_to_4h": ("mlp.fc1",),
        "mlp.dense_4h_to_h": ("mlp.fc2",),
        "final_norm": ("model.final_layernorm",),
    },
    LLAMA.layers,
    _ONE_NORM | {"output_layer_bias": True},
    _GROUPED | _LAYERNORM | {"hidden_dropout": "resid_pdrop"},
    only={"qk_layernorm": False, "tie_word_embeddings": False},
)
_GPT_ENTRIES = {
    **{"num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"},
    **{"seq_length": "n_positions", "activation": "activation_function"},
    **{"intermediate_size": "n_inner", "layernorm_epsilon": "layer_norm_epsilon"},
    **{"attention_dropout": "attn_pdrop", "hidden_dropout": "resid_pdrop"},
    "make_vocab_size_divisible_by": "vocab_size",
}
_GPT_DEFAULTS = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GPTJ = HubClass(
    "GPTJForCausalLM",
    "gptj",
    _PLAIN,
    _GPT_DEFAULTS
    | {"n_positions": 2048, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False}
    | {"rotary_dim": 64, "rope_theta": 10000.0},
    {
        "embedding.word_embeddings": ("transformer.wte",),
        "input_layernorm": ("ln_1",),
        "attention.query_key_value": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.dense": ("attn.out_proj",),
        "mlp.dense_h_to_4h": ("mlp.fc_in",),
        "mlp.dense_4h_to_h": ("mlp.fc_out",),
        "final_norm": ("transformer.ln_f",),
        "output": ("lm_head",),
    },
    "transformer.h.",
    _ONE_NORM | {"output_layer_bias": True, "use_bias_in_attn_linear": False},
    _GPT_ENTRIES,
    only={"tie_word_embeddings": False},
)
GPT2 = HubClass(
    "GPT2LMHeadModel",
    "gpt2",
    _PLAIN,
    _GPT_DEFAULTS
    | {"n_positions": 1024, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True},
    {
        "embedding.word_embeddings": ("transformer.wte",),
        "embedding.position_embeddings": ("transformer.wpe",),
        "input_layernorm": ("ln_1",),
        "attention.query_key_value": ("attn.c_attn",),
        "attention.dense": ("attn.c_proj",),
        "post_attention_layernorm": ("ln_2",),
        "mlp.dense_h_to_4h": ("mlp.c_fc",),
        "mlp.dense_4h_to_h": ("mlp.c_proj",),
        "final_norm": ("transformer.ln_f",),
        "output": ("lm_head",),
    },
    "transformer.h.",
    {"norm": "layernorm", "pos_emb": "learned"},
    _GPT_ENTRIES,
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    | {"add_cross_attention": False},
    transposed=True,
)
OPT = HubClass(
    "OPTForCausalLM",
    "opt",
    _PLAIN,
    {"activation_function": "relu", "attention_dropout": 0.0, "dropout": 0.1, "enable_bias": True}
    | {"max_position_embeddings": 2048, "tie_word_embeddings": True},
    {
        "embedding.word_embeddings": ("model.decoder.embed_tokens",),
        "embedding.position_embeddings": ("model.decoder.embed_positions",),
        "input_layernorm": ("self_attn_layer_norm",),
        "attention.query_key_value": LLAMA.modules["attention.query_key_value"],
        "attention.dense": ("self_attn.out_proj",),
        "post_attention_layernorm": ("final_layer_norm",),
        "mlp.dense_h_to_4h": ("fc1",),
        "mlp.dense_4h_to_h": ("fc2",),
        "final_norm": ("model.decoder.final_layer_norm",),
        "output": ("lm_head",),
    },
    "model.decoder.layers.",
    {"norm": "layernorm", "pos_emb": "learned", "opt_pos_emb_offset": 2},
    _ENTRIES
    | {"activation": "activation_function", "intermediate_size": "ffn_dim"}
    | {"hidden_dropout": "dropout"}
    | dict.fromkeys(("use_bias_in_attn_linear", "use_bias_in_mlp"), "enable_bias"),
    only={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True}
    | {"_remove_final_layer_norm": False, "word_embed_proj_dim": "hidden_size"},
)
CLASSES = (NEOX, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, STABLELM, PHI, GPTJ, GPT2, OPT)


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
