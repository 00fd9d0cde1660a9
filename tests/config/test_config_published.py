"""Test that published config files load unchanged, with the meaning that they have in that code.

`derived_args.json` contains settings that the published code derived from its own config files. The
YAML files in the fixtures have the same content as those files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import Config, load_config
from megatron.config.neox.known_keys import FIELD_OF, KNOWN_KEYS
from tests.helpers.paths import FIXTURES

CONFIG_FIXTURES = FIXTURES / "config"
CASES = json.loads((CONFIG_FIXTURES / "derived_args.json").read_text())

# Names of the published code's attributes that are not keys, and values it names otherwise.
RENAMED = {"optimizer_type": "type", "zero_stage": "zero_stage", "lr": "lr"}
VALUES = {"Adam": "adam", "bfloat16": "bf16", "kerple_power_ap_": "kerple_power"}
# The output layer's side is the published default there; both sides are the same function.
DIFFERENT = {"output_layer_parallelism"}


def load_case(case: dict, tmp_path: Path, world_size: int, *overrides: str) -> Config:
    """Load the config of a case, from files in the fixtures and newly written overlay files."""
    want = case["derived"]
    evaluates = "ex_eval.yml" in case["files"]
    overlay = {
        **{key.replace("_", "-"): want[key] for key in ("save", "load", "seed")},
        "data-path": want["data_path"],
        "pos-emb": want["pos_emb"],
    }
    if evaluates:  # how the published ex_eval.yml differs from train.yml
        overlay |= {"train-iters": 0, "train_micro_batch_size_per_gpu": 1, "eval-iters": 320}
        overlay |= {"seq-length-val": want["seq_length_val"]}
    path = tmp_path / "exp.yml"
    path.write_text(json.dumps(overlay, indent=4))
    files = [CONFIG_FIXTURES / "kerple_local_setup.yml", CONFIG_FIXTURES / "kerple_train.yml", path]
    return load_config(files, overrides, world_size=world_size)


@pytest.mark.parametrize("name", sorted(CASES))
def test_derived_values_agree(name: str, tmp_path: Path) -> None:
    want = CASES[name]["derived"]
    world_size = int(name.rpartition("gpus")[2])
    config = load_case(CASES[name], tmp_path, world_size)
    ours = {field: value for _, section in config.sections() for field, value in section}
    compared = 0
    for key, value in want.items():
        if key in DIFFERENT:
            continue
        compared += 1
        field = RENAMED.get(key) or FIELD_OF.get(key)
        if field is None:  # has no effect here: the value is accepted, and changes nothing
            override = f"{key}={json.dumps(value)}"
            assert load_case(CASES[name], tmp_path, world_size, override) == config
            continue
        expected = VALUES.get(value, value) if isinstance(value, str) else value
        assert ours[field] == expected, key
    assert compared >= 60
    assert config.optimizer.betas == (0.9, 0.999) and config.optimizer.eps == 1e-8
    assert config.parallel.zero["reduce_bucket_size"] == 500_000_000
    assert "stage" not in config.parallel.zero and "cpu_offload" not in config.parallel.zero


def test_published_training_needs_only_an_embedding(tmp_path: Path) -> None:
    overlay = tmp_path / "exp.yml"
    overlay.write_text('{"pos-emb": "kerple_power__ap", "data-path": "data/arxiv"}')
    config = load_config([CONFIG_FIXTURES / "kerple_train.yml", overlay])
    assert config.model.pos_emb == "kerple_power_mul"
    assert any(note.startswith("synchronize_each_layer: accepted") for note in config.notes)
    assert any("`save` names no folder" in note for note in config.notes)


def test_the_other_dialect() -> None:
    config = load_config([CONFIG_FIXTURES / "neox_head.yml"], world_size=2)
    assert (config.checkpoint.save_interval, config.checkpoint.extra_save_iters) == (
        100,
        (0, 1, 2, 4),
    )
    assert (config.training.precision, config.training.grad_accum_dtype) == ("bf16", "fp32")
    assert (config.lr.min_lr, config.lr.decay_iters) == (1e-4, 900)
    assert config.batch.train_batch_size == 32
    assert config.parallel.zero == {"reduce_bucket_size": 500_000_000}
    assert (config.parallel.zero_stage, config.parallel.pipe_parallel_size) == (1, 1)
    assert (config.model.activation, config.model.attention_backend) == ("swish", "auto")
    noted = [note.split(":")[0] for note in config.notes]
    assert sorted(noted) == ["attention_config", "log_grad_norm", "rope_fusion"]


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("", "fp32"),
        ("precision: bfloat16", "bf16"),
        ("precision: BF16", "bf16"),
        ("bf16: {enabled: true, loss_scale: 0}", "bf16"),
        ("fp16: {enabled: True, type: bfloat16}", "bf16"),
        ("fp16: {fp16: true, enabled: true, loss_scale: 0, initial_scale_power: 12}", "fp16"),
        ("precision: fp16\nfp16: {hysteresis: 2}", "fp16"),
        ("precision: bfloat16\nfp16: {enabled: false}", "bf16"),
        ("fp16: {enabled: false}\nbf16: {enabled: false}", "fp32"),
        ("fp16: {}", "fp32"),
    ],
)
def test_precisions(load, text: str, precision: str) -> None:
    assert load(text).training.precision == precision


@pytest.mark.parametrize(
    ("text", "stage"),
    [("", 1), ("zero_optimization: {}", 0), ("zero_optimization: {stage: 3}", 3)]
    + [("zero_optimization: {overlap_comm: true}", 0)],
)
def test_zero_stage_defaults(load, text: str, stage: int) -> None:
    assert load(text).parallel.zero_stage == stage


@pytest.mark.parametrize(
    "text",
    [
        "attention_config: [[[global], 2]]",
        'attention-config: [[["flash"], "all"]]',
        "attention_config: [[[global, flash], 1]]",
        "attention_config: [flash, global]",
    ],
)
def test_whole_sequence_attention_in_every_form(load, text: str) -> None:
    assert load(text).model.attention_backend == "auto"


def test_every_key_of_published_files_is_known() -> None:
    keys = (CONFIG_FIXTURES / "neox_keys.txt").read_text().split()
    assert len(keys) == 132
    tops = {key.split(".")[0] for key in KNOWN_KEYS}
    assert [key for key in keys if key not in tops] == []
