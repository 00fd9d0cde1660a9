"""Test GPT-NeoX's checkpoints that are damaged or incomplete, or whose shards differ."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

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
from tests.helpers.paths import FIXTURES

MODELS = FIXTURES / "parity" / "models"


def copy_of(name: str, tmp_path: Path) -> tuple[Path, str]:
    shutil.copytree(MODELS / name / "checkpoint", tmp_path / name)
    return tmp_path / name, newest(tmp_path / name).tag


def edit(path: Path, change) -> None:
    state = safe_load(path)
    change(state)
    path.unlink()  # tensors read from it are mapped
    torch.save(state, path)


def spoil_counts(files):
    edit(
        files / "mp_rank_00_model_states.pt", lambda s: s["args"].update(model_parallel_size=10**8)
    )


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda f: torch.save([1], f / layout.file_name(2, 0)), "does not hold values by name"),
        (lambda f: torch.save([1], f / "mp_rank_00_model_states.pt"), "does not hold values"),
        (lambda f: shutil.copy(f / layout.file_name(2, 0), f / layout.file_name(2, 10**8)), "more"),
        (spoil_counts, "3 layers in 100000000 tensor-parallel ranks are more than any model has"),
        (
            lambda f: edit(
                f / layout.file_name(2, 0),
                lambda s: s.update({"mlp.dense_h_to_4h.weight": torch.tensor([1, 2])}),
            ),
            "mlp.dense_h_to_4h.weight: not a dense tensor of floats",
        ),
        (
            lambda f: [
                edit(
                    f / layout.file_name(i, 0),
                    lambda s: s.update({"attention.rpe.bias_p": torch.ones(1, 1, 1)}),
                )
                for i in (2, 3, 4)
            ],
            "attention.rpe.*: stack expects",
        ),
    ],
)
def test_damaged_files_are_named_and_nothing_is_written(tmp_path, spoil, text):
    folder, tag = copy_of("kerple_log", tmp_path)
    spoil(folder / tag)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        import_checkpoint(folder / tag, tmp_path / "ours", summed_biases=False)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("recorded", ["x", [1], -3, torch.tensor(2)])
def test_what_mp_rank_records_wrongly_counts_as_not_recorded(tmp_path, recorded):
    folder, tag = copy_of("kerple_log", tmp_path)

    def spoil(client):
        client.update(args={"num_layers": recorded}, iteration=recorded, lr_scheduler=recorded)

    edit(folder / tag / "mp_rank_00_model_states.pt", spoil)
    found = neox.read(folder / tag)
    assert not found.problems and found.schedule is None
    assert (found.shape.num_layers, found.step) == (3, 50000)


def test_a_missing_rank_is_seen_although_no_file_says_that_there_were_two(tmp_path):
    folder, tag = copy_of("tp2_column_original", tmp_path)
    for path in [*(folder / tag).glob("*model_01*"), *(folder / tag).glob("mp_rank_*")]:
        path.unlink()
    with pytest.raises(CheckpointError, match="all files of some rank are missing"):
        import_checkpoint(folder / tag, tmp_path / "ours", summed_biases=False)


def test_shards_that_merging_alters_are_given_back_as_they_were(tmp_path):
    """Such shards are biases that are summed, and replicas that differ slightly."""
    folder, tag = copy_of("tp2_row_gptj_geglu", tmp_path)
    files = folder / tag
    bias, norm = "attention.dense.bias", "input_layernorm.weight"

    def apart(state):
        state[bias] = torch.full_like(state[bias], 1 / 3)
        state[norm] = state[norm] * (1 + 1e-6)

    edit(files / layout.file_name(2, 1), apart)
    first, second = (torch.load(files / layout.file_name(2, part)) for part in (0, 1))
    exact = first[bias].double() + second[bias].double()
    found = import_checkpoint(files, tmp_path / "ours", summed_biases=True)
    assert torch.equal(found.weights[f"layers.0.{bias}"].double(), exact)
    assert not torch.equal(exact.float().double(), exact)
    back = export_checkpoint(tmp_path / "ours", tmp_path / "back")
    for part, theirs in enumerate((first, second)):
        ours = torch.load(back / layout.file_name(2, part))
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    whole = export_checkpoint(tmp_path / "ours", tmp_path / "whole", parts=1)
    merged = torch.load(whole / layout.file_name(2, 0))[bias]
    assert merged.dtype == torch.float32 and torch.equal(merged, exact.float())


@pytest.mark.parametrize("summed", [True, False])
def test_an_import_for_another_residual_is_refused(tmp_path, summed):
    """Without its config, a checkpoint is merged as if trained without `gpt_j_residual`."""
    folder, tag = copy_of("tp2_row_gptj_geglu", tmp_path)
    import_checkpoint(folder / tag, tmp_path / "ours", summed_biases=summed)
    own = ["model_parallel_size=1", "make_vocab_size_divisible_by=64", "seq_length_val=null"]
    config = load_config([MODELS / "tp2_row_gptj_geglu" / "config.yml"], own)
    gpt = GPT(plan_of(config, 64, device_type="cpu"))
    if summed:
        assert load_weights(gpt, Saved(tmp_path / "ours", tag)) == []
        return
    with pytest.raises(CheckpointError, match="merged for gpt_j_residual: false.*import again"):
        load_weights(gpt, Saved(tmp_path / "ours", tag))


def test_an_import_never_replaces_what_is_there(tmp_path):
    folder, tag = copy_of("kerple_log", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(CheckpointError, match="exists already"):
        import_checkpoint(folder / tag, folder, summed_biases=False)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    import_checkpoint(folder / tag, tmp_path / "ours", summed_biases=False)
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(tmp_path / "ours", folder)
