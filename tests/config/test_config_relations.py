"""Test relations between keys: the message for each refused pair says what to write instead."""

from typing import Any

import pytest
import yaml

from megatron.config import ConfigError, load_config
from megatron.config.per_layer import same_layers

BASE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_iters": 10,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "pos_emb": "kerple_log",
}
MUON = {"type": "Muon", "params": {"lr": 0.01}}
REFUSED = [
    ({"warmup": 0.6}, "warmup", "write at most 0.5"),
    (
        {"optimizer": MUON, "zero_optimization": {"stage": 3}},
        "optimizer.type: muon needs whole matrices, and ZeRO-3 divides them",
        "write zero_optimization: {stage: 1}, or type: adam",
    ),
    ({"optimizer": {**MUON, "params": {"lr": 1, "momentum": 1}}}, "momentum", "e.g. 0.95"),
    ({"lr_decay_style": "wsd", "warmup": 0.95}, "warmup", "write at most 0.9"),
    ({"gpt_j_tied": True}, "gpt_j_tied", "write gpt_j_residual: true"),
    ({"gpt_j_residual": True, "output_norms": True}, "output_norms", "gpt_j_residual: false"),
    ({"qk_layernorm_kind": "shared"}, "qk_layernorm_kind", "write use_qk_layernorm: true"),
    (
        {"qk_layernorm_kind": "joined", "use_qk_layernorm": True, "norm": "rmsnorm"},
        "qk_layernorm_kind",
        "write norm: rmsnorm and rmsnorm_fusion: true",
    ),
    ({"output_layer_bias": True}, "output_layer_bias", "write no_weight_tying: true"),
    ({"head_dim": 10**12}, "head_dim", "parameters follow from it"),
    ({"head_dim": 3, "pos_emb": "rotary"}, "pos_emb", "int(head size 3 x"),
    ({"hidden_size": 33}, "hidden_size", "or name head_dim"),
    ({"hidden_dropout": 1.0}, "hidden_dropout", "below 1"),
    ({"attention_dropout": 1.0}, "attention_dropout", "below 1"),
    ({"seed": 2**32}, "seed", "smaller"),
    (
        {"torch_compile_mode": "reduce-overhead"},
        "torch_compile_mode",
        "reduce-overhead without torch_compile, so nothing is compiled; write torch_compile: true",
    ),
    ({"curriculum": [[0, 5], [4, 16]]}, "curriculum", "5 does not divide seq_length 16"),
    ({"curriculum": [[1, 8], [4, 16]]}, "curriculum", "its steps are 1, 4; write steps that begin"),
    ({"curriculum": [[0, 8], [4, 4], [4, 16]]}, "curriculum", "begin with 0 and rise"),
    (
        {"curriculum": [[0, 4], [4, 8]]},
        "curriculum",
        "ends with length 8; write a last length of 16",
    ),
    ({"curriculum": [0, 4]}, "curriculum", "expected a list of [step, length]"),
    ({"curriculum": [[0, 0]]}, "curriculum", "a whole number of at least 1"),
    (
        {"curriculum": [[0, 8], [4, 16]], "data_path": "builtin:copy"},
        "curriculum",
        "would cut the examples of copy; leave it out",
    ),
    ({"eval_lengths_interval": 1000}, "eval_lengths_interval", "without eval_lengths"),
    (
        {"eval_lengths": [16], "eval_lengths_interval": 300, "eval_interval": 200},
        "eval_lengths_interval",
        "300 is no multiple of eval_interval 200",
    ),
    ({"eval_lengths": [16], "eval_context_baseline": 16}, "eval_context_baseline", "small context"),
    ({"finetune": True, "save": "a", "load": "a/"}, "finetune", "; add -o save=a-tuned"),
    ({"pos_emb": "rpe", "rpe_num_buckets": 1}, "rpe_num_buckets", "at least 2"),
    ({"reset_position_ids": True}, "reset_position_ids", "reset_attention_mask: true too"),
    (
        {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
        | {"precision": "bfloat16"},
        "grad_accum_dtype",
        "zero_optimization: {stage: 1}",
    ),
    (
        {"pipe_parallel_size": 2, "data_types": {"grad_accum_dtype": "fp32"}}
        | {"zero_optimization": {"stage": 1}, "precision": "fp16"},
        "grad_accum_dtype",
        "no_weight_tying: true",
    ),
    (
        {"output_layer_parallelism": "row", "no_weight_tying": True, "hidden_size": 40}
        | {"num_attention_heads": 6, "head_dim": 8, "model_parallel_size": 3},
        "output_layer_parallelism",
        "row divides hidden_size 40 among model_parallel_size 3; write column",
    ),
    ({"mlp_type": "llama"}, "mlp_type", "activation: swiglu"),
]


def load(tmp_path, **changes):
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(BASE | changes))
    return load_config([path])


@pytest.mark.parametrize(("changes", "key", "text"), REFUSED)
def test_it_is_refused_with_what_to_write(tmp_path, changes, key, text):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, **changes)
    message = str(error.value)
    assert key in message and text in message and "config.yml:" in message


def test_the_values_beside_them_are_accepted(tmp_path):
    load(tmp_path, warmup=0.5, hidden_dropout=0.99, attention_dropout=0.99, seed=2**32 - 1)
    load(tmp_path, eval_lengths=[16], eval_context_baseline=15)
    load(tmp_path, reset_position_ids=True, reset_attention_mask=True)
    load(tmp_path, finetune=True, save="a", load="b")
    load(tmp_path, curriculum=[[0, 4], [9, 2], [11, 16]], data_path="builtin:python-stdlib")
    load(tmp_path, pos_emb="rpe", rpe_num_buckets=2)


@pytest.mark.parametrize(
    ("there", "here", "same"),
    [
        ([[["a"], 3]], [[["a"], 2], [["a"], 1]], True),
        ([[["a"], 3]], "a", True),
        ([[["a", "b", "a"], 1]], [[["a"], 1], [["b", "a"], 1]], True),
        ([[["a"], 3]], [[["a"], 2], [["b"], 1]], False),
        ([[["a"], 10**12]], [[["a"], 3]], False),
        ([["a"], "all"], [[["a"], 3]], False),
    ],
)
def test_layers_may_be_grouped_otherwise(there: Any, here: Any, same: bool) -> None:
    assert same_layers(here, there, 3) == same


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("profile: true\nprofile_step_start: 20", "profile_step_stop: 12 is below"),
        ("profile: true\ntrain_iters: 9", "profile_step_start: 10 is above train_iters 9"),
        ("flops_profiler: {enable: true}", "did you mean enabled"),
        ("flops_profiler: {enabled: true}\npipe_parallel_size: 2", "never ends it"),
    ],
)
def test_profiles_that_cannot_be_made(problems, text, words) -> None:
    [found] = problems(text, world_size=2)
    assert words in found


def test_a_long_name_of_a_precision_agrees_with_the_mapping(tmp_path) -> None:
    config = load(tmp_path, precision="float16", fp16={"enabled": True})
    assert config.training.precision == "fp16"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("pos_emb", "[[[rotary], 3]]", "names 3 layers, but num_layers is 2"),
        ("pos_emb", "[[[rotary, rotery], 1]]", "unknown value 'rotery'; did you mean rotary?"),
        ("pos_emb", "[[[rotary], all], [[none], 1]]", "all must stand alone"),
        ("pos_emb", "rotary + none + rotary", "rotary occurs twice"),
        ("pos_emb", "[[rotary, 2]]", "expected a list of values, got 'rotary'"),
        ("pos_emb", "[[rotary], 2]", "expected pairs of values and repeats"),
        ("pos_emb", "rotary + kerpel_log", "did you mean kerple_log?"),
        ("sliding_window_width", "[[[8, none, none], all]]", "names 0 layers"),
        ("sliding_window_width", "[[[-1], 2]]", "expected a whole number of at least 0"),
    ],
)
def test_values_per_layer(problems, key: str, value: str, says: str) -> None:
    (line,) = problems(f"{key}: {value}")
    assert line.startswith(f"over.yml:1: {key}: ") and says in line
