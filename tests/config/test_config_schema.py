"""Test `Config`: it is frozen, comparable, documented, and equal after saving and loading."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron.config import Config, load_config
from megatron.config.describe import describe
from megatron.config.neox.known_keys import FIELD_OF, KEY_OF, KNOWN_KEYS
from megatron.config.neox.no_effect import CHECKS, NO_EFFECT
from megatron.config.neox.refused import REFUSED
from megatron.config.schema import SECTIONS
from tests.helpers.paths import ROOT


def test_nothing_can_be_assigned(load: Callable) -> None:
    config = load("zero_optimization: {stage: 1, overlap_comm: true}")
    with pytest.raises(ValidationError, match="frozen"):
        config.model.num_layers = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.model = None
    with pytest.raises(TypeError, match="frozen"):
        config.parallel.zero["overlap_comm"] = False
    with pytest.raises(TypeError, match="frozen"):
        config.model.pos_emb_options.update(a=1)
    assert config == load("zero_optimization: {stage: 1, overlap_comm: true}")


def test_it_can_be_copied_and_sent_to_a_process(load: Callable) -> None:
    config = load("zero_optimization: {overlap_comm: true}")
    assert copy.deepcopy(config) == config
    sent = pickle.loads(pickle.dumps(config))
    assert sent == config and describe(sent) == describe(config)


def test_equality_is_of_the_values(load: Callable) -> None:
    assert load("norm: rmsnorm") == load("", "norm=RMSNorm")
    assert load("norm: rmsnorm") != load()
    assert load() != "base"


def test_attribute_names_and_keys_are_unique() -> None:
    names = [name for section in SECTIONS.values() for name in section.model_fields]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    keys = [key for key in KEY_OF.values() if key]
    assert len(keys) == len(set(keys)) == len(FIELD_OF)


def test_a_key_has_one_meaning() -> None:
    assert not set(FIELD_OF) & set(NO_EFFECT)
    assert not set(FIELD_OF) & set(REFUSED)
    assert not set(NO_EFFECT) & set(REFUSED)
    assert set(CHECKS) <= set(NO_EFFECT)


def test_keys_without_effect_are_noted_once(load: Callable) -> None:
    config = load("steps_per_print: 5\ncsv_monitor: {enabled: true, top: 3}\nlog_param_norm: false")
    assert [note.split(":")[0] for note in config.notes] == ["steps_per_print", "csv_monitor"]
    assert config == load()


def test_a_repeated_key_and_keys_of_forks_are_noted(load: Callable) -> None:
    config = load("seed: 1\nmlp_width: 32\ncapev2_kernel: 3\nseed: 1")
    assert config.training.seed == 1
    again, *rest = config.notes
    assert again.startswith("seed: given again on line 4, with the same value (")
    assert [note.split(":")[0] for note in rest] == ["mlp_width", "capev2_kernel"]
    (note,) = load("attention_type: groupedquery").notes
    assert "num_kv_heads sets the number" in note
    corpora = "train_data_paths: [a, b]\nvalid_data_paths: [a]\ntest_data_paths: [a]\n"
    corpora += "train_data_weights: [1, 2]\nweight_by_num_documents: "
    assert "train_data_weights: no effect" in load(f"{corpora}true").notes[0]
    assert load(f"{corpora}false").notes == ()


@pytest.mark.parametrize("key", sorted(CHECKS))
def test_keys_without_effect_are_checked_nevertheless(problems: Callable, key: str) -> None:
    (line,) = problems(f"{key}: {{a: 1}}")
    assert line.startswith(f"over.yml:1: {key}: expected ") and "; write " in line


HARMLESS = {
    "apply_query_key_layer_scaling": "false",
    "data_impl": "MMAP",
    "soft_prompt_tuning": "{enabled: false}",
    "deepspeed_extra_args": "{comms_logger: {enabled: true}}",
    "amp": "{enabled: false}",
    "scheduler": "{}",
    "use_mup": "false",
    "num_unique_layers": "2",
    "moe_num_experts": "1",
    "train_impl": "normal",
    "optimizer.params.adam_w_mode": "true",
    "train_label_data_paths": "[]",
    "batch_size": "4",
}


def test_the_name_of_another_code_base_is_noted(load: Callable) -> None:
    assert load("pos_emb: rotary+kerple").notes == load("pos_emb: Kerple").notes
    config = load("pos_emb: Kerple")
    assert config.model.pos_emb == "kerple_log"
    assert [note.split("(")[0] for note in config.notes] == [
        "pos_emb: kerple is DAPE's name of kerple_log "
    ]
    assert load("pos_emb: kerple_log").notes == ()


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_a_refused_key_may_ask_for_what_happens_anyway(load: Callable, key: str) -> None:
    assert key in REFUSED
    config = load("", f"{key}={HARMLESS[key]}")
    assert config == load() and config.notes == ()


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_every_refused_key_is_refused_with_a_reason(problems: Callable, key: str) -> None:
    (line,) = problems("", f"{key}=something else")
    assert line.startswith(
        f"-o {key}=something else: {key}: the text 'something else' is refused: "
    )
    assert re.search(r"; (write .+ instead|leave it out)$", line)


def test_derived_defaults(load: Callable) -> None:
    config = load("data_path: builtin:python-stdlib\ntrain_iters: 0")
    model = config.model
    assert (model.num_kv_heads, model.seq_length_val, model.max_position_embeddings) == (4, 32, 32)
    assert config.data.tokenizer_type == "ByteLevelTokenizer"
    assert (config.training.train_iters, config.lr.decay_iters) == (0, 1)
    named = load("data_path: builtin:python-stdlib\ntokenizer_type: charleveltokenizer")
    assert named.data.tokenizer_type == "CharLevelTokenizer"


@pytest.mark.parametrize(
    ("text", "width", "told"),
    [
        ("hidden_size: 64", 256, "256 = intermediate_size 256"),
        ("activation: geglu", 170, "170 = intermediate_size 512 x 2/3 / 2"),  # the published width
        ("activation: swiglu", 85, "85 = intermediate_size 256 x 2/3 / 2"),
        ("activation: swiglu\nexpansion_factor: 6.0", 128, "128 = intermediate_size 384 x 2/3 / 2"),
        ("intermediate_size: 100\nmlp_multiple_of: 64", 128, "100, rounded up to a multiple of 64"),
        # gpt-neox's llama/7B, 13B, 30B, 65B, llama2/13B, 70B, and mistral/7B
        *((f"activation: swiglu\nintermediate_size: {size}\nmlp_multiple_of: 256", width, "256")
          for size, width in {32768: 11008, 40960: 13824, 53248: 17920, 65536: 22016,
                              41472: 13824, 86016: 28672}.items()),
        ("activation: swiglu\nintermediate_size: 14336", 4778, "MLP inner width 4778"),
    ],
)  # fmt: skip
def test_the_inner_width_is_that_of_gpt_neox(
    load: Callable, text: str, width: int, told: str
) -> None:
    config = load(text)
    assert config.model.inner_width == width
    assert told in next(line for line in describe(config).splitlines() if "MLP inner" in line)


def test_options_of_an_embedding(load: Callable) -> None:
    config = load("pos_emb_options: {scale: 2.0}")
    assert config.model.pos_emb_options == {"scale": 2.0}


def test_describe_says_where_and_what_follows(load: Callable, tmp_path: Path) -> None:
    config = load("warmup: 0.5\nsynchronize_each_layer: true", "norm=rmsnorm", world_size=2)
    text = describe(config)
    assert f"warmup 0.5 {tmp_path}/over.yml:1" in " ".join(text.split())
    assert "-o norm=rmsnorm" in text
    assert "train_batch_size 8 = 4 micro x 1 accumulation x 2 data-parallel" in text
    assert "warm-up 5 iterations = 0.5 x 10" in text
    assert "synchronize_each_layer: accepted, without effect here (" in text


def test_the_order_of_masters_is_never_changed(load: Callable) -> None:
    """`round_robin_gradients` reorders the master weights, which would break resumed runs."""
    config = load("zero_optimization: {stage: 2, round_robin_gradients: true}")
    assert "round_robin_gradients" not in config.parallel.zero
    text = describe(config)
    assert "zero_optimization.round_robin_gradients: accepted, without effect here (" in text


def test_flat_keys_are_known_and_fit_for_json(load: Callable) -> None:
    flat = load("precision: bf16").to_flat_dict()
    assert json.loads(json.dumps(flat)) == flat
    assert set(flat) <= {key.split(".")[0] for key in KNOWN_KEYS}
    assert flat["precision"] == "bfloat16" and flat["fp16"]["enabled"] is False
    assert flat["optimizer"] == {
        "type": "adam",
        "params": {
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "momentum": 0.0,
            "split_fused": True,
        },
    }


def reload(config: Config, path: Path) -> Config:
    path.write_text(config.to_yaml())
    return load_config([path], world_size=config.parallel.world_size)


changes = st.fixed_dictionaries(
    {},
    optional={
        "num_layers": st.integers(1, 5),
        "hidden_size": st.sampled_from([8, 64, 128]),
        "pos_emb": st.sampled_from(["alibi", "kerple_power_ap_", "kerple_power_ap_ap", "none"]),
        "seq_length_val": st.integers(1, 10**6),
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
        "hidden_dropout": st.floats(0, 0.99),
        "layernorm_epsilon": st.floats(1e-12, 1),
        "train_iters": st.integers(0, 10**7),
        "train_batch_size": st.sampled_from([8, 16, 80]),
        "precision": st.sampled_from(["fp32", "fp16", "bfloat16"]),
        "warmup": st.floats(0, 0.5),
        "split": st.sampled_from(["949,50,1", "1", "90/5/5"]),
        "load": st.sampled_from(["1e5", "None", "010", "yes", "1:30", "~", "x y"]),
        "save": st.text("abc é:#'\"{}[]-\\\t\n0", min_size=1, max_size=8),
        "checkpoint_factor": st.integers(1, 100),
        "extra_save_iters": st.lists(st.integers(0, 9), max_size=3),
        "eval_lengths": st.lists(st.integers(1, 65536), max_size=3),
        "zero_optimization": st.fixed_dictionaries(
            {},
            optional={
                "stage": st.integers(0, 3),
                "overlap_comm": st.booleans(),
                "reduce_bucket_size": st.integers(1, 10**9),
            },
        ),
        "fp16": st.fixed_dictionaries({"hysteresis": st.integers(1, 9)}),
        "data_types": st.fixed_dictionaries({"grad_accum_dtype": st.sampled_from(["fp32", None])}),
        "pos_emb_options": st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3)),
    },
).map(lambda change: without_refused_pairs(change))


def without_refused_pairs(change: dict) -> dict:
    """Remove keys that other keys exclude; test_config_relations.py tests such pairs."""
    stage = (change.get("zero_optimization") or {"stage": 1}).get("stage", 0)
    refused = {"data_types"} if stage == 0 or change.get("zero_optimization") == {} else set()
    if change.get("finetune"):
        refused.add("load")
    return {key: value for key, value in change.items() if key not in refused}


@given(changes, st.sampled_from([1, 2]))
def test_the_flat_form_loads_back_equal(tmp_path_factory, change: dict, world: int) -> None:
    directory = tmp_path_factory.mktemp("flat")
    base, over = directory / "base.yml", directory / "over.yml"
    base.write_text(
        "{num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, train_iters: 9,"
        "pos_emb: none, train_micro_batch_size_per_gpu: 4, optimizer: {params: {lr: 6e-4}}}"
    )
    over.write_text(json.dumps(change))
    config = load_config([base, over], world_size=world)
    as_json = directory / "flat.json"
    as_json.write_text(json.dumps(config.to_flat_dict()))
    assert load_config([as_json], world_size=world) == config
    again = reload(config, directory / "flat.yml")
    assert again == config
    assert again.to_flat_dict() == config.to_flat_dict()


def test_more_processes_keep_the_global_batch(load: Callable, tmp_path: Path) -> None:
    one = load("gradient_accumulation_steps: 4")
    path = tmp_path / "flat.json"
    path.write_text(json.dumps(one.to_flat_dict()))
    two = load_config([path], world_size=2)
    assert two.batch.train_batch_size == one.batch.train_batch_size == 16
    assert two.batch.gradient_accumulation_steps == 2
    assert two.sources == (str(path),)


def test_importing_and_loading_needs_no_torch(base: Path) -> None:
    code = (
        "import sys; from megatron.config import load_config; "
        "from megatron.config.describe import describe; "
        f"describe(load_config([{str(base)!r}])); "
        "print([m for m in ('torch', 'numpy', 'deepspeed') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
