"""Test the small config of a rehearsal: it keeps the layout, and every ready file has one."""

import json

import pytest

from megatron.config import load_config
from megatron.rehearsal.narrow import narrow
from tests.helpers.paths import ROOT

MODELS = sorted(
    path.relative_to(ROOT)
    for kind in ("model", "llama")
    for path in ROOT.glob(f"configs/{kind}/*.yml")
)
LAYOUT = ["model_parallel_size=2", "pipe_parallel_size=2", "train_micro_batch_size_per_gpu=4"]
STEPS = ["gradient_accumulation_steps=9", "train_batch_size=null"]


def small_and_large(folder, files, changes, size):
    """Return the config of a rehearsal, and that of the run."""

    def load(*more):
        return load_config([ROOT / file for file in files], [*changes, *more], world_size=size)

    large = load()
    return load(*narrow(large, folder)), large


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_every_ready_model_can_be_rehearsed(tmp_path, file):
    files = [file, "configs/pos_emb/kerple_log.yml", "configs/paper/train.yml"]
    heads = load_config([ROOT / each for each in files]).model.num_attention_heads
    layout = LAYOUT if heads % 2 == 0 else LAYOUT[1:]
    small, large = small_and_large(tmp_path, files, [*layout, *STEPS], 16)
    assert small.parallel == large.parallel.model_copy(update={"distributed_backend": None})
    assert small.model.num_attention_heads == large.model.num_attention_heads
    assert small.model.num_layers in (2, 3)
    assert small.model.seq_length <= 16 and small.model.hidden_size <= 400
    assert small.batch.gradient_accumulation_steps == 3  # they fill two stages, and one more
    assert small.training.train_iters == small.training.eval_interval == 1
    assert small.data.data_path == str(tmp_path / "text") and small.checkpoint.save == "run"


def test_options_that_communicate_remain(tmp_path):
    changes = [
        "sequence_parallel=true", "model_parallel_size=4", "context_parallel_size=2",
        "zero_optimization.stage=3", "num_kv_heads=8", "checkpoint_activations=true",
        "async_save=true", "precision=fp16", "train_micro_batch_size_per_gpu=4",
        "eval_lengths=[512, 4096]",
    ]  # fmt: skip
    files = ["configs/model/6-7B.yml", "configs/pos_emb/kerple_log.yml", "configs/paper/train.yml"]
    small, large = small_and_large(tmp_path, files, changes, 16)
    assert small.parallel.zero_stage == 3 and small.parallel.sequence_parallel
    assert small.model.seq_length % 8 == 0 and small.model.num_kv_heads == 8
    assert small.model.num_layers == 2 and small.model.checkpoint_activations
    assert small.checkpoint.async_save and small.training.precision == "fp16"
    assert small.training.initial_scale_power == 0
    assert small.evaluation.eval_lengths == (16,) != large.evaluation.eval_lengths


def test_layers_that_are_named_one_by_one_remain(tmp_path):
    files = ["configs/model/small.yml", "configs/paper/train.yml"]
    layers = ["pos_emb=[[[kerple_log, none], all]]", "train_micro_batch_size_per_gpu=4"]
    small, large = small_and_large(tmp_path, files, layers, 4)
    assert small.model.num_layers == large.model.num_layers > 2


def test_a_length_task_needs_no_text(tmp_path):
    files = ["configs/tasks/copy.yml"]
    small, large = small_and_large(tmp_path, files, [], 1)
    assert small.data == large.data and small.model.seq_length == large.model.seq_length
    assert small.evaluation.eval_lengths == large.evaluation.eval_lengths[:1]
    assert not list(tmp_path.iterdir())


def test_a_length_task_with_long_examples_and_a_fading_retrofit_can_be_rehearsed(tmp_path):
    changes = ["pos_emb=fire", "eval_lengths=[40, 80]"]
    small, _ = small_and_large(tmp_path, ["configs/tasks/copy.yml"], changes, 1)
    assert small.evaluation.eval_lengths == (40,) and small.evaluation.eval_tokens == 80
    changes = ["finetune=true", "load=x", "pos_emb=kerple_log", "retrofit_anneal=100"]
    small, large = small_and_large(tmp_path, ["configs/quickstart.yml"], changes, 1)
    assert large.checkpoint.retrofit_anneal == 100 and small.checkpoint.retrofit_anneal == 0


def test_a_rehearsal_has_one_length(tmp_path):
    schedule = {"difficulty": [64, 128], "max_step": [5]}
    curriculum = {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 64, "max_difficulty": 128,
        "schedule_type": "fixed_discrete", "schedule_config": schedule,
    }  # fmt: skip
    changes = [f"curriculum_learning={json.dumps(curriculum)}", "seq_length=128"]
    files = ["configs/model/small.yml", "configs/pos_emb/kerple_log.yml", "configs/paper/train.yml"]
    changes += ["train_micro_batch_size_per_gpu=4"]
    small, large = small_and_large(tmp_path, files, changes, 1)
    assert large.training.curriculum == ((0, 64), (5, 128)) and not small.training.curriculum
