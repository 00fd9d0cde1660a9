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
# fmt: off
_PLAIN = {"gelu": "gelu", "relu": "relu", "silu": "swish", "mish": "mish", "swish": "swish"}
_PLAIN |= dict.fromkeys(TANH, "gelu")
_GATES = {
    "silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu", "linear": "bilinear",
    "swish": "swiglu",
}
_COMMON = {
    "tie_word_embeddings": False, "attention_dropout": 0.0, "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}
_ENTRIES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads", "seq_length": "max_position_embeddings",
    "activation": "hidden_act", "intermediate_size": "intermediate_size",
    "attention_dropout": "attention_dropout", "make_vocab_size_divisible_by": "vocab_size",
}
# fmt: on
_GROUPED = _ENTRIES | {"num_kv_heads": "num_key_value_heads"}
_LAYERNORM, _RMS_EPS = {"layernorm_epsilon": "layer_norm_eps"}, {"rms_norm_epsilon": "rms_norm_eps"}
_RMSNORM = {"norm": "rmsnorm", "rmsnorm_fusion": True}
_NO_BIASES = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}


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


# fmt: off
NEOX = HubClass(
    "GPTNeoXForCausalLM", "gpt_neox", "gpt_neox.layers.", _PLAIN,
    keys={"norm": "layernorm"},
    entries=_ENTRIES | _LAYERNORM | {
        "hidden_dropout": "hidden_dropout", "use_bias_in_attn_linear": "attention_bias",
        "gpt_j_residual": "use_parallel_residual",
    },
    modules={
        "embedding.word_embeddings": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",  # transformers 5 reads and writes this name, too
    },
    defaults=_COMMON | {
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout": 0.0,
        "attention_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25,
    },
)
LLAMA = HubClass(
    "LlamaForCausalLM", "llama", "model.layers.", _GATES,
    keys=_RMSNORM,
    entries=_GROUPED | _RMS_EPS | {
        "use_bias_in_attn_linear": "attention_bias", "use_bias_in_mlp": "mlp_bias",
    },
    modules={
        "embedding.word_embeddings": "model.embed_tokens",
        "attention.query_key_value": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
        "attention.dense": "self_attn.o_proj", "mlp.dense_4h_to_h": "mlp.down_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj mlp.gate_proj",
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "final_norm": "model.norm", "output": "lm_head",
    },
    defaults=_COMMON | {
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": None, "head_dim": None,
        "attention_bias": False, "mlp_bias": False, "sliding_window": None,
    },
)
MISTRAL = replace(
    LLAMA, name="MistralForCausalLM", model_type="mistral",
    keys=_RMSNORM | _NO_BIASES, entries=_GROUPED | _RMS_EPS,
    defaults=LLAMA.defaults | {
        "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072,
    },
)
QWEN2 = replace(
    MISTRAL, name="Qwen2ForCausalLM", model_type="qwen2",
    keys=MISTRAL.keys | {"add_qkv_bias": True}, only={"use_sliding_window": False},
    defaults=LLAMA.defaults | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
)
_QK_NORM = _RMSNORM | {"use_qk_layernorm": True, "use_bias_in_mlp": False}
QWEN3 = replace(
    QWEN2, name="Qwen3ForCausalLM", model_type="qwen3",
    keys=_QK_NORM | {"qk_layernorm_kind": "shared"}, defaults=QWEN2.defaults | {"head_dim": 128},
    entries=_GROUPED | _RMS_EPS | {"use_bias_in_attn_linear": "attention_bias"},
)
OLMO2 = replace(
    QWEN3, name="Olmo2ForCausalLM", model_type="olmo2", only={},
    keys=_QK_NORM | {"qk_layernorm_kind": "joined", "output_norms": True},
    defaults=LLAMA.defaults | {"rms_norm_eps": 1e-5},
)
STABLELM = HubClass(
    "StableLmForCausalLM", "stablelm", LLAMA.layers, _GATES,
    keys={"norm": "layernorm"} | _NO_BIASES, modules=LLAMA.modules,
    entries=_GROUPED | _LAYERNORM | {
        "add_qkv_bias": "use_qkv_bias",
        "gpt_j_residual": "use_parallel_residual", "gpt_j_tied": "use_parallel_residual",
    },
    defaults=_COMMON | {
        "hidden_act": "silu", "layer_norm_eps": 1e-5, "num_key_value_heads": 32,
        "use_qkv_bias": False, "use_parallel_residual": False, "partial_rotary_factor": 0.25,
        "max_position_embeddings": 4096,
    },
    only={"qk_layernorm": False, "hidden_dropout": 0.0},
)
_ONE_NORM = {"norm": "layernorm", "gpt_j_residual": True, "gpt_j_tied": True}
PHI = HubClass(
    "PhiForCausalLM", "phi", LLAMA.layers, _PLAIN,
    keys=_ONE_NORM | {"output_layer_bias": True},
    entries=_GROUPED | _LAYERNORM | {"hidden_dropout": "resid_pdrop"},
    modules=LLAMA.modules | {
        "attention.dense": "self_attn.dense", "final_norm": "model.final_layernorm",
        "mlp.dense_h_to_4h": "mlp.fc1", "mlp.dense_4h_to_h": "mlp.fc2",
    },
    defaults=_COMMON | {
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "num_key_value_heads": None,
        "resid_pdrop": 0.0, "partial_rotary_factor": 0.5, "head_dim": None,
    },
    only={"qk_layernorm": False, "tie_word_embeddings": False},
)
_GPT = HubClass(
    "GPT2LMHeadModel", "gpt2", "transformer.h.", _PLAIN,
    keys={"norm": "layernorm", "pos_emb": "learned"},
    entries={
        "num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
        "seq_length": "n_positions", "activation": "activation_function",
        "intermediate_size": "n_inner", "layernorm_epsilon": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop", "hidden_dropout": "resid_pdrop",
        "make_vocab_size_divisible_by": "vocab_size",
    },
    modules={
        "embedding.word_embeddings": "transformer.wte", "output": "lm_head",
        "embedding.position_embeddings": "transformer.wpe", "final_norm": "transformer.ln_f",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
        "attention.query_key_value": "attn.c_attn", "attention.dense": "attn.c_proj",
        "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj",
    },
    defaults={
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024,
        "attn_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True, "n_inner": None,
    },
    only={
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    transposed=True,
)
GPTJ = replace(
    _GPT, name="GPTJForCausalLM", model_type="gptj", transposed=False,
    keys=_ONE_NORM | {"output_layer_bias": True, "use_bias_in_attn_linear": False},
    modules=_GPT.modules | {
        "attention.query_key_value": "attn.q_proj attn.k_proj attn.v_proj",
        "attention.dense": "attn.out_proj",
        "mlp.dense_h_to_4h": "mlp.fc_in", "mlp.dense_4h_to_h": "mlp.fc_out",
    },
    defaults=_GPT.defaults | {
        "n_positions": 2048, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False,
        "rotary_dim": 64,
    },
    only={"tie_word_embeddings": False},
)
OPT = HubClass(
    "OPTForCausalLM", "opt", "model.decoder.layers.", _PLAIN,
    keys=_GPT.keys | {"opt_pos_emb_offset": 2},
    entries=_ENTRIES | {
        "activation": "activation_function", "intermediate_size": "ffn_dim",
        "hidden_dropout": "dropout",
        "use_bias_in_attn_linear": "enable_bias", "use_bias_in_mlp": "enable_bias",
    },
    modules={
        "embedding.word_embeddings": "model.decoder.embed_tokens", "output": "lm_head",
        "embedding.position_embeddings": "model.decoder.embed_positions",
        "input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm",
        "attention.query_key_value": LLAMA.modules["attention.query_key_value"],
        "attention.dense": "self_attn.out_proj", "mlp.dense_h_to_4h": "fc1",
        "mlp.dense_4h_to_h": "fc2", "final_norm": "model.decoder.final_layer_norm",
    },
    defaults={
        "activation_function": "relu", "attention_dropout": 0.0, "dropout": 0.1,
        "enable_bias": True, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    only={
        "do_layer_norm_before": True, "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False, "word_embed_proj_dim": "hidden_size",
    },
)
# fmt: on
CLASSES = (NEOX, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, STABLELM, PHI, GPTJ, _GPT, OPT)


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
