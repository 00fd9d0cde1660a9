"""Test that GPT-NeoX's checkpoints are read, refused if wrong, and exported without a loss."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

from megatron.attention import choose
from megatron.engine.checkpoint.exchange import export_checkpoint, import_checkpoint
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from megatron.engine.checkpoint.write import prune
from megatron.engine.errors import CheckpointError
from megatron.engine.neox import layout
from megatron.engine.neox import read as neox
from megatron.engine.neox.buffers import wrong_buffers
from megatron.engine.safe_load import safe_load
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.positional import load, within_bounds
from tests.helpers.paths import ROOT
from tools import export_neox, import_kerple

MODELS = ROOT / "tests" / "fixtures" / "parity" / "models"
CASES = sorted(path.name for path in MODELS.iterdir())
KERPLE = {"num_layers": 3, "vocab_size": 512, "max_positions": 64}


def source_of(name: str) -> Path:
    folder = MODELS / name / "checkpoint"
    return newest(folder).path


def copy_of(name: str, tmp_path: Path) -> tuple[Path, str]:
    shutil.copytree(MODELS / name / "checkpoint", tmp_path / name)
    return tmp_path / name, newest(tmp_path / name).tag


def model(pos_emb="kerple_log", hidden_size=64, **changes) -> GPT:
    pos = load(pos_emb)
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(hidden_size=hidden_size, num_heads=4)
    return GPT(Plan(GPTShape(**KERPLE | changes, block=block), pos, attend, 1))


def small_model(pos_emb: str) -> GPT:
    """Build a model of the shape of the cases `power_beyond_bounds` and `tp2_column_original`."""
    return model(pos_emb, 24, num_layers=2, vocab_size=64, max_positions=16)


def edit(path: Path, change) -> None:
    state = torch.load(path)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize("name", CASES)
def test_import_then_export_gives_the_same_files(name, tmp_path):
    """File names and tensor names, shapes, dtypes and values of all shards are the same."""
    source = source_of(name)
    found = import_checkpoint(source, tmp_path / "ours", summed_biases="gptj" in name)
    back = export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert back.name == source.name == newest(tmp_path / "back").tag
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    mine = {path.relative_to(back) for path in back.rglob("*") if path.is_file()}
    # the fixtures lack the mp_rank file of the second rank
    assert mine - {Path("mp_rank_01_model_states.pt")} == files
    compared = 0
    for path in (path for path in files if path.name.startswith("layer_")):
        theirs, ours = torch.load(source / path), torch.load(back / path)
        assert theirs.keys() == ours.keys()
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
            compared += 1
    assert compared > 20
    client = safe_load(back / "mp_rank_00_model_states.pt")
    assert client["iteration"] == found.step and client["mp_world_size"] == found.shape.parts


def test_the_shape_is_read_off_the_files():
    shape = neox.read(source_of("tp2_row_gptj_geglu")).shape
    assert (shape.parts, shape.geglu, shape.row_output, shape.tied) == (2, True, True, False)
    assert shape.theta == ("bias_p", "bias_a")
    shape = neox.read(source_of("rpe_tied_rmsnorm")).shape
    assert (shape.parts, shape.tied, shape.theta) == (1, True, ("weight",))
    ten = neox.read(source_of("learned_ten_layers"))
    assert ten.shape.num_layers == 10 and ten.step == 12 and not ten.problems
    assert "layers.9.mlp.dense_4h_to_h.bias" in ten.weights


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("geglu", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_merging_the_shards_gives_the_tensor_back(parts, geglu, summed):
    generator = torch.Generator().manual_seed(parts)
    for name, size in {
        "word_embeddings.weight": (16, 8),
        "attention.query_key_value.bias": (24,),
        "attention.dense.weight": (8, 8),
        "attention.dense.bias": (8,),
        "mlp.dense_h_to_4h.weight": (32, 8),
        "mlp.dense_4h_to_h.weight": (8, 16),
        "attention.rpe.bias_a": (4, 1, 1),
        "attention.rpe.weight": (32, 4),
        "input_layernorm.weight": (8,),
        "final_linear.weight": (16, 8),
    }.items():
        whole = torch.randn(size, generator=generator)
        how = neox.Shape(1, geglu=geglu, summed_biases=summed, row_output=True).rule(name)
        pieces = layout.split(whole, how, parts)
        assert len(pieces) == parts and torch.equal(layout.merge(pieces, how), whole), name


def test_geglu_shards_hold_a_piece_of_both_halves():
    whole = torch.arange(8.0)  # values 0-3, gates 4-7
    first, second = layout.split(whole, "halves", 2)
    assert first.tolist() == [0, 1, 4, 5] and second.tolist() == [2, 3, 6, 7]


class Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", ["zip", "old", "pickle"])
@pytest.mark.parametrize("file", [layout.file_name(2, 0), "mp_rank_00_model_states.pt"])
def test_a_hostile_file_is_refused_and_nothing_runs(tmp_path, kind, file):
    folder, tag = copy_of("kerple_log", tmp_path)
    proof = tmp_path / "it ran".replace(" ", "_")
    content = {"attention.dense.bias": Hostile(proof), "iteration": Hostile(proof)}
    path = folder / tag / file
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError, match="refused, and nothing in it was run") as error:
        load_weights(model(), Saved(folder, tag))
    assert kind == "pickle" or "posix.system" in str(error.value)
    with pytest.raises(CheckpointError):
        import_checkpoint(folder / tag, tmp_path / "ours", summed_biases=False)
    assert not proof.exists() and not (tmp_path / "ours" / "latest").exists()
    if kind == "pickle":  # without the refusal the file runs its code
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert proof.exists()


def test_a_set_and_a_random_state_of_numpy_are_let_through():
    client = safe_load(source_of("kerple_log") / "mp_rank_00_model_states.pt")
    assert client["csr_tensor_module_names"] == set() and client["np_rng_state"][0] == "MT19937"


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path):
    folder, tag = copy_of("kerple_log", tmp_path)
    files = folder / tag

    def spoil(state):
        state["attention.dense.weight"] = torch.zeros(64, 32)
        state["attention.extra.weight"] = state.pop("mlp.dense_h_to_4h.bias")

    edit(files / "layer_03-model_00-model_states.pt", spoil)
    with pytest.raises(CheckpointError) as error:
        load_weights(model(vocab_size=640), Saved(folder, tag))
    for text in (
        "layers.1.attention.dense.weight: (64, 32) in the checkpoint, (64, 64) here",
        "layers.1.mlp.dense_h_to_4h.bias: missing in the checkpoint",
        "layers.1.attention.extra.weight: not in this model",
        "output.weight: (512, 64) in the checkpoint, (640, 64) here",
        "make_vocab_size_divisible_by: 512",
        "configs",
    ):
        assert text in str(error.value)
    (files / "layer_06-model_00-model_states.pt").unlink()
    for place in ((9, 0), (4, 1)):
        shutil.copy(files / layout.file_name(2, 0), files / layout.file_name(*place))
    with pytest.raises(CheckpointError) as error:
        import_checkpoint(files, tmp_path / "ours", summed_biases=False)
    for text in (
        "layer_06-model_00-model_states.pt: missing",
        "layer_02-model_01-model_states.pt: missing",
        "layer_09-model_00-model_states.pt: has no place among 3 layers",
    ):
        assert text in str(error.value)


def test_kernels_that_pipeline_stages_trained_apart_are_refused(tmp_path):
    folder, tag = copy_of("kerple_log", tmp_path)
    path = folder / tag / "layer_04-model_00-model_states.pt"
    edit(path, lambda state: state["attention.rpe.bias_p"].mul_(1.5))
    with pytest.raises(CheckpointError, match=r"kernel of blocks \[2\] is not that of block 0"):
        load_weights(model(), Saved(folder, tag))


def test_replicas_that_differ_are_refused(tmp_path):
    folder, tag = copy_of("tp2_column_original", tmp_path)
    path = folder / tag / "layer_02-model_01-model_states.pt"
    edit(path, lambda state: state["input_layernorm.weight"].add_(0.1))
    problems = neox.read(folder / tag).problems
    assert len(problems) == 1 and "input_layernorm.weight" in problems[0]
    edit(path, lambda state: state["input_layernorm.weight"].sub_(0.1))
    found = neox.read(folder / tag)
    assert not found.problems and any("differ slightly" in note for note in found.notes)


def test_theta_beyond_its_bounds_is_projected_once_and_reported():
    saved = newest(MODELS / "power_beyond_bounds" / "checkpoint")
    gpt = small_model("kerple_power_add_mul").double()
    pos = gpt.pos
    stored = neox.read(saved.path).weights["embedding.theta"]
    outside = int((within_bounds(stored.double(), pos.parameters) != stored).sum())
    assert outside >= 4
    [note] = load_weights(gpt, saved)
    assert note == f"{outside} of 16 kernel parameters lay beyond their bounds: projected"
    assert gpt.theta.min().item() == 0.01 and gpt.theta[:, 0].max().item() == 2.0  # in float64


def test_what_the_embedding_implies_must_agree(tmp_path):
    saved = newest(MODELS / "tp2_column_original" / "checkpoint")
    with pytest.raises(CheckpointError, match="bias_a: other values than pos_emb none has here"):
        load_weights(small_model("none"), saved)
    import_checkpoint(saved.path, tmp_path, summed_biases=False)
    with pytest.raises(CheckpointError, match="bias_a: other values than pos_emb none has here"):
        load_weights(small_model("none"), Saved(tmp_path, saved.tag))
    sandwich = load("sandwich")  # the published code has none, so it stores nothing of it
    assert wrong_buffers(
        BlockShape(32, 4), sandwich, {layout.BUFFERS[2]: sandwich.initial_theta(4)}
    )


@pytest.mark.parametrize("imported", [False, True])
def test_the_kernels_columns_must_be_those_of_the_embedding(tmp_path, imported):
    """A Gaussian has as many columns as the stored logarithmic kernel, with another meaning."""
    saved = newest(MODELS / "kerple_log" / "checkpoint")
    if imported:
        import_checkpoint(saved.path, tmp_path, summed_biases=False)
        saved = newest(tmp_path)
    for name in ("gaussian", "rotary + gaussian"):
        with pytest.raises(CheckpointError, match="bias_p, bias_a in the .* has gauss_a, gauss_r"):
            load_weights(model(name), saved)


def test_an_imported_checkpoint_gives_the_weights_of_the_published_one(tmp_path):
    folder = MODELS / "kerple_log" / "checkpoint"
    saved = newest(folder)
    import_checkpoint(saved.path, tmp_path, summed_biases=False)
    one, other = model(), model()
    load_weights(one, saved)
    load_weights(other, newest(tmp_path))
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    imported = newest(tmp_path)
    assert imported.step == 50000
    assert imported.record.imported["schedule"]["decay_style"] == "cosine"


def test_one_checkpoint_is_not_taken_for_the_folder_that_holds_it():
    with pytest.raises(CheckpointError, match="is one checkpoint; name the folder that holds it"):
        newest(source_of("kerple_log"))


def test_the_published_folders_are_never_pruned(tmp_path):
    folder, tag = copy_of("kerple_log", tmp_path)
    (folder / "global_step60000").mkdir()
    (folder / "global_step60000" / "kerple.json").write_text("{}")
    prune(Saved(folder, "global_step60000"), 1, "")
    assert (folder / tag).is_dir()


def test_the_tools(tmp_path, monkeypatch, capsys):
    def call(main, *args):
        monkeypatch.setattr(sys, "argv", ["tool", *map(str, args)])
        code = main()
        out, err = capsys.readouterr()
        return code, out + err

    source, a = source_of("tp2_row_gptj_geglu").parent, tmp_path / "a"
    code, text = call(import_kerple.main, source, a)
    assert code == 0 and "step 14, 2 layers" in text and "2 tensor-parallel ranks" in text
    shape = json.loads((a / "global_step14/kerple.json").read_text())["imported"]["shape"]
    assert shape["summed_biases"]  # gpt_j_residual, read in the stored configuration
    code, text = call(import_kerple.main, source / "global_step14", tmp_path / "b", "--config")
    assert code == 0 and "taken as trained without gpt_j_residual" in text
    code, text = call(export_neox.main, a, tmp_path / "c", "--tp", "1")
    assert code == 0 and "6 files" in text
    code, text = call(export_neox.main, a, tmp_path / "c")
    assert code == 1 and "exists already" in text
    code, text = call(export_neox.main, a, tmp_path / "d", "--tp", "16")
    assert code == 1 and "export to fewer ranks" in text
    code, text = call(import_kerple.main, a, tmp_path / "e")
    assert code == 1 and "holds no published checkpoint" in text
