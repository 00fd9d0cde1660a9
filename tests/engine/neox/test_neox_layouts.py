"""Test GPT-NeoX's checkpoints of other layouts: with pipelines, without, and of drifting ranks."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.config import load_config
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.exchange import export_checkpoint, import_checkpoint
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from megatron.engine.errors import CheckpointError
from megatron.engine.neox import layout
from megatron.engine.neox import read as neox
from megatron.engine.safe_load import safe_load
from megatron.model import GPT
from megatron.parallel.groups import build_groups
from tests.helpers.launch import call
from tests.helpers.paths import FIXTURES

MODELS = FIXTURES / "parity" / "models"


@pytest.fixture(name="copied")
def _copied(tmp_path):
    def copy(name):
        shutil.copytree(MODELS / name / "checkpoint", tmp_path / name)
        return newest(tmp_path / name).path

    return copy


def edit(path, change):
    state = safe_load(path, mmap=False)
    change(state)
    torch.save(state, path)


def model_of(name, *changes):
    own = ["model_parallel_size=1", "make_vocab_size_divisible_by=64", "seq_length_val=null"]
    config = load_config([MODELS / name / "config.yml"], [*own, *changes])
    return GPT(plan_of(config, 64, device_type="cpu"))


def test_a_pipelines_stages_do_not_count_as_tensor_parallel_ranks(copied):
    """DeepSpeed's pipeline engine writes stages x tensor-parallel ranks as `mp_world_size`."""
    files = copied("tp2_row_gptj_geglu")
    edit(files / "mp_rank_00_model_states.pt", lambda state: state.update(mp_world_size=8))
    found = neox.read(files, summed_biases=True)
    assert found.shape.parts == 2 and not found.problems


def without_pipeline(files):
    """Store the weights as gpt-neox with `pipe_parallel_size: 0` does."""
    client = safe_load(files / "mp_rank_00_model_states.pt", mmap=False)
    modules = {}
    for path in sorted(files.glob("layer_*")):
        index, rank = map(int, layout.FILE.fullmatch(path.name).groups())
        state = {f"sequential.{index}.{k}": v for k, v in torch.load(path).items()}
        modules.setdefault(rank, {}).update(state)
        path.unlink()
    for rank, module in modules.items():
        torch.save(client | {"module": module}, files / f"mp_rank_{rank:02d}_model_states.pt")


@pytest.mark.parametrize("name", ["kerple_log", "tp2_row_gptj_geglu", "rpe_tied_rmsnorm"])
def test_a_checkpoint_without_a_pipeline_is_the_same_model(copied, tmp_path, name):
    files = copied(name)
    with_pipeline = neox.read(files)
    expected = {k: v.clone() for k, v in with_pipeline.weights.items()}
    without_pipeline(files)
    found = neox.read(files)
    assert found.shape == with_pipeline.shape and found.step == with_pipeline.step
    assert not found.problems
    assert found.weights.keys() == expected.keys()
    assert all(torch.equal(found.weights[each], expected[each]) for each in expected)
    out = call("tools/import_kerple.py", files.parent, tmp_path / "ours")
    assert f"step {found.step}, {found.shape.num_layers} layers" in out
    assert Saved(tmp_path / "ours", files.name).weights().keys() == expected.keys()


def test_what_holds_no_weights_is_damaged(copied):
    """Such as a checkpoint of this project without its record: its weights have other names."""
    files = copied("kerple_log")
    groups = build_groups(torch.device("cpu"))
    assert Saved(files.parent, files.name).damage(groups) is None
    for path in files.glob("layer_*"):
        path.unlink()
    edit(files / "mp_rank_00_model_states.pt", lambda s: s.update(module={"w": torch.ones(2)}))
    assert "no layer files, and no weights" in Saved(files.parent, files.name).damage(groups)
    with pytest.raises(CheckpointError, match="a file is missing"):
        neox.read(files)


def test_a_missing_rank_without_a_pipeline_is_named(copied, tmp_path):
    files = copied("tp2_column_original")
    without_pipeline(files)
    edit(files / "mp_rank_00_model_states.pt", lambda s: s["args"].update(model_parallel_size=2))
    (files / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="layer_00-model_01-model_states.pt: missing"):
        import_checkpoint(files, tmp_path / "ours", summed_biases=False)


def test_norms_of_ranks_that_drifted_apart_are_averaged(copied, tmp_path):
    files = copied("tp2_column_original")
    path, name = files / layout.file_name(2, 1), "input_layernorm.weight"
    first = torch.load(files / layout.file_name(2, 0))[name]
    edit(path, lambda state: state.update({name: first + 0.004}))
    found = import_checkpoint(files, tmp_path / "ours", summed_biases=False)
    assert torch.allclose(found.weights[f"layers.0.{name}"], first + 0.002, atol=1e-6)
    [note] = [note for note in found.notes if "their mean is taken" in note]
    assert f"1 tensors, such as 2.{name}" in note
    back = export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert torch.equal(torch.load(back / path.name)[name], torch.load(path)[name])
    edit(path, lambda state: state.update({name: first + 0.1}))
    assert "should be equal, but differ by up to 0.1" in neox.read(files).problems[0]
    bias = "attention.dense.bias"  # with gpt_j_residual, these are different numbers
    edit(path, lambda state: state.update({name: first, bias: state[bias] + 0.004}))
    assert bias in neox.read(files).problems[0]


def test_the_second_norm_that_gpt_j_tied_does_not_use_is_left_out(copied, tmp_path):
    """gpt-neox stores it all the same."""
    name, changes = "tp2_row_gptj_geglu", ["gpt_j_tied=true"]
    files = copied(name)
    import_checkpoint(files, tmp_path / "ours", summed_biases=True)
    for saved in (Saved(files.parent, files.name), Saved(tmp_path / "ours", files.name)):
        tied = model_of(name, *changes)
        load_weights(tied, saved)
        assert not any("post_attention" in each for each in tied.state_dict())
        stored = neox.read(files, summed_biases=True).weights["layers.1.input_layernorm.weight"]
        assert torch.equal(tied.layers[1].input_layernorm.weight, stored)


def test_biases_are_not_split_if_no_config_says_how(copied, tmp_path):
    """With `gpt_j_residual`, each of two ranks needs half a bias, and otherwise all of it."""
    files = copied("kerple_log")
    shutil.rmtree(files / "configs", ignore_errors=True)
    out = call("tools/import_kerple.py", files.parent, tmp_path / "ours")
    assert "an export to several ranks needs an import with --config" in out
    with pytest.raises(CheckpointError, match="import it again with --config"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out", parts=2)
    export_checkpoint(tmp_path / "ours", tmp_path / "out")
    config = tmp_path / "neox.yml"
    config.write_text("gpt-j-residual: true\n")
    call("tools/import_kerple.py", files.parent, tmp_path / "with", "--config", config)
    halves = export_checkpoint(tmp_path / "with", tmp_path / "halves", parts=2)
    bias = "attention.dense.bias"
    half = torch.load(halves / layout.file_name(2, 1))[bias]
    assert torch.equal(half, torch.load(files / layout.file_name(2, 0))[bias] / 2)


def test_norms_that_newer_gpt_neox_computes_otherwise_are_named(copied):
    name = "rpe_tied_rmsnorm"
    files = copied(name)
    saved = Saved(files.parent, files.name)
    assert load_weights(model_of(name), saved) == []
    names = {"mlp.dense_h_to_4h": "mlp.linear1", "mlp.dense_4h_to_h": "mlp.linear2"}

    def renamed(state):
        for old, new in names.items():
            for key in [key for key in state if key.startswith(old)]:
                state[key.replace(old, new)] = state.pop(key)
        if "attention.dense.weight" in state:
            state["attention.qk_layernorm.scale"] = torch.ones(4, 6)

    for path in files.glob("layer_*"):
        edit(path, renamed)
    client = files / "mp_rank_00_model_states.pt"
    edit(client, lambda state: state.update(args={"num_attention_heads": 4}))
    [note] = load_weights(model_of(name, "use_qk_layernorm=true"), saved)
    assert "inside the root, as rmsnorm_fusion: true does here" in note
    fused = model_of(name, "use_qk_layernorm=true", "rmsnorm_fusion=true")
    assert load_weights(fused, saved) == [note]
