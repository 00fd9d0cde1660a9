"""Test how checkpoint folders are found, pruned and read; errors name the remedy."""

import errno
import json
import math
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.engine.checkpoint import checksums, publish, write
from megatron.engine.checkpoint.async_save import Saver
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.record import Record, RunDescription, TrainingProgress
from megatron.engine.checkpoint.resume import Start
from megatron.engine.checkpoint.saved_checkpoints import Saved, finished, newest
from megatron.engine.checkpoint.write import prune, set_aside_foreign
from megatron.engine.errors import CheckpointError, FailedElsewhereError
from megatron.parallel.groups import build_groups
from megatron.positional import load
from megatron.run_folder import tag_of
from tests.helpers.paths import FIXTURES


def make(folder, step, weights=None, zero_stage=1, lineage="a"):
    saved = Saved(folder, tag_of(step))
    saved.path.mkdir(parents=True)
    record = {
        "lineage": lineage,
        "layout": {"zero_stage": zero_stage},
        "model": {"width": 1},
        "progress": {"step": step, "consumed_samples": step, "train_samples": 200},
    }
    (saved.path / "kerple.json").write_text(json.dumps(record))
    torch.save({"module": weights or {}}, saved.path / "mp_rank_00_model_states.pt")
    return saved


def test_no_latest_is_no_checkpoint(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None


@pytest.mark.parametrize("content", ["global_step7", "", "../elsewhere"])
def test_a_latest_that_names_nothing_lists_what_is_there(tmp_path, content):
    make(tmp_path, 5)
    (tmp_path / "latest").write_text(content)
    with pytest.raises(CheckpointError, match="there: global_step5"):
        newest(tmp_path)


def test_pruning_counts_numbers_not_letters_and_spares_what_it_does_not_know(tmp_path):
    for step in (5, 100, 20, 9):
        make(tmp_path, step)
    (tmp_path / "global_step_mine").mkdir()
    prune(Saved(tmp_path, "global_step100"), 2, "a")
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"global_step100", "global_step20", "global_step_mine"}


def test_what_lies_beyond_the_newest_is_neither_counted_nor_removed(tmp_path):
    """Checkpoint 15 is damaged, so the run went back. At step 12 it keeps 10 and 12."""
    for step in (5, 10, 12, 15):
        make(tmp_path, step)
    prune(Saved(tmp_path, "global_step12"), 2, "a")
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"global_step10", "global_step12", "global_step15"}
    prune(Saved(tmp_path, "global_step10"), 1, "a")  # a run that started over in a used folder
    assert {p.name for p in tmp_path.iterdir()} == left


def test_only_checkpoints_of_the_same_run_are_removed_or_replaced(tmp_path, capsys):
    for step, lineage in ((1, "a"), (2, "b"), (3, ""), (4, "a"), (5, "a")):
        make(tmp_path, step, lineage=lineage)
    (make(tmp_path, 0, lineage="a").path / "kerple.json").write_text("{")
    prune(Saved(tmp_path, "global_step5"), 1, "a")
    assert [each.step for each in finished(tmp_path)[1:]] == [2, 3, 5]
    set_aside_foreign(Saved(tmp_path, "global_step5"), "a")
    assert not capsys.readouterr().out
    set_aside_foreign(Saved(tmp_path, "global_step2"), "a")
    assert "global_step2 is not of this run: renamed to" in capsys.readouterr().out
    [aside] = tmp_path.glob("global_step2.of-another-run-*")
    assert Record.read(aside).lineage == "b" and len(finished(tmp_path)) == 3


def test_checkpoints_of_an_earlier_version_belong_to_the_run_that_goes_on_from_them(tmp_path):
    for step in (1, 2):
        shutil.copytree(FIXTURES / "checkpoint" / "run" / "global_step3", tmp_path / tag_of(step))
    start = Start(None, "", Saved(tmp_path, tag_of(2)), resumes=True)
    assert start.lineage == ""
    prune(Saved(tmp_path, tag_of(2)), 1, start.lineage)
    assert [each.tag for each in finished(tmp_path)] == [tag_of(2)]
    tuned = Start(None, "", Saved(tmp_path, tag_of(2)))
    assert len(tuned.lineage) == 32 and tuned.lineage == tuned.lineage != Start(None, "").lineage


def test_a_failed_write_is_reported_with_the_space_that_is_left(tmp_path):
    torchs = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0")
    text = publish.why_not_written(tmp_path / "not" / "there", torchs)
    assert re.fullmatch("a file could not be written to its end; [0-9,]+ MB are free there", text)
    assert publish.why_not_written(tmp_path, OSError(13, "No")).startswith("[Errno 13] No; ")


@pytest.mark.parametrize(
    ("disk", "error", "says"),
    [
        ({"f_files": 1000, "f_favail": 0}, OSError(28, "No space"), "all 1,000 files (inodes)"),
        ({"f_files": 0, "f_favail": 0}, OSError(28, "No space"), "60 MB are free there"),
        ({}, OSError(errno.EDQUOT, "Quota"), "60 MB are free there, but this user's quota is used"),
    ],
)
def test_a_failed_write_names_what_is_used_up(tmp_path, monkeypatch, disk, error, says):
    free = {"f_bavail": 60, "f_frsize": 10**6, "f_files": 10, "f_favail": 5}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**free | disk))
    assert says in publish.why_not_written(tmp_path, error)


@pytest.mark.parametrize("where", ["engine", "record"])
def test_a_failed_save_leaves_nothing_on_the_full_disk(tmp_path, monkeypatch, where):
    def full(*_arguments, **_keywords):
        raise OSError(28, "No space left on device")

    def written(folder, tag, _client, **_keywords):
        (tmp_path / tag / "mp_rank_00_model_states.pt").write_bytes(b"1")
        if where == "engine":
            full()

    monkeypatch.setattr(checksums, "sealed", full)
    engine = SimpleNamespace(save_checkpoint=written, checkpoint_engine=None)
    progress, run = TrainingProgress(5, 5, 9), RunDescription()
    with pytest.raises(CheckpointError, match="global_step5 cannot be written .*No space left"):
        to = write.Destination(tmp_path, run)
        groups = build_groups(torch.device("cpu"))
        Saver(engine, groups, to, beside_training=False, say=print).save(progress)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_files_another_rank_removed_leaves_the_report_to_it(tmp_path):
    saved = Saved(tmp_path, tag_of(5))
    unfinished = publish.create_unfinished(tmp_path, saved.tag)
    with pytest.raises(CheckpointError) as first, write.removed_if_it_fails(saved):
        raise OSError(28, "No space left on device")
    assert type(first.value) is CheckpointError and list(tmp_path.iterdir()) == []
    with pytest.raises(FailedElsewhereError), write.removed_if_it_fails(saved):
        (unfinished / "weights.pt").write_bytes(b"1")


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "huge"])
def test_a_record_that_is_no_small_file_is_refused(tmp_path, kind):
    saved = make(tmp_path, 5)
    path = saved.path / "kerple.json"
    path.unlink()
    if kind == "huge":
        with path.open("wb") as file:
            file.truncate(10**11)
    else:
        (os.mkfifo if kind == "a pipe" else os.mkdir)(path)
    with pytest.raises(CheckpointError, match="at most 134,217,728|not a reg|Is a dir"):
        Record.read(saved.path)
    assert "cannot be read" in saved.damage(build_groups(torch.device("cpu")))


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    make(tmp_path, 5)
    (tmp_path / ".unfinished-global_step9").mkdir()
    (tmp_path / ".latest.4711.unfinished").write_text("global_step9")  # as `files` names it
    assert publish.remove_unfinished(tmp_path) == [".unfinished-global_step9"]
    assert {path.name for path in tmp_path.iterdir()} == {"global_step5"}


@pytest.mark.parametrize("killed", ["before the new one is in place", "before the old one goes"])
def test_a_kill_while_a_checkpoint_is_replaced_loses_neither(tmp_path, killed):
    make(tmp_path, 5)
    (tmp_path / "latest").write_text("global_step5")
    (tmp_path / "global_step5").rename(tmp_path / ".replaced-global_step5")
    (tmp_path / ".unfinished-global_step5").mkdir()
    if killed == "before the old one goes":
        (tmp_path / ".unfinished-global_step5").rename(tmp_path / "global_step5")
    publish.remove_unfinished(tmp_path)
    assert newest(tmp_path) == Saved(tmp_path, "global_step5")
    assert {p.name for p in tmp_path.iterdir()} == {"global_step5", "latest"}


def test_a_kill_before_latest_is_written_is_completed(tmp_path):
    make(tmp_path, 5)
    (tmp_path / ".latest.4711.unfinished").write_text("global_step5")
    assert publish.remove_unfinished(tmp_path) == []
    assert newest(tmp_path) == Saved(tmp_path, "global_step5")
    assert {p.name for p in tmp_path.iterdir()} == {"global_step5", "latest"}


def test_a_missing_latest_is_no_empty_folder(tmp_path):
    for step in (5, 10):
        make(tmp_path, step)
    with pytest.raises(CheckpointError, match="latest is missing, but .*global_step10 is there"):
        newest(tmp_path)


COUNTERS = {"step": 5, "consumed_samples": 5, "train_samples": 5}
FORGED = {
    "progress.step: Input should be a valid integer": {"progress": {"step": "5"}},
    "progress.train_samples: Field required": {"progress": {"step": 5, "consumed_samples": 5}},
    "progress.step: Input should be greater than or equal to 0": {"progress": {"step": -1}},
    "progress.interval.losses: Input should be a valid array": {
        "progress": COUNTERS | {"interval": {"steps": 1, "losses": "abc"}},
    },
    "layout: Input should be an object": {"layout": []},
    "layout: Value error, zero_stage is '1', not a whole number": {"layout": {"zero_stage": "1"}},
    "cuts.a: List should have at least 2 items": {"cuts": {"a": [0]}},
    "files: Input should be an object": {"files": 3},
    "config: Input should be an object": {"config": "x"},
    "lineage: Input should be a valid string": {"lineage": 7},
    "kerple.json is of format 2, written by version 9.1; this is version": {
        "format": 2, "version": "9.1", "progress": "in another shape",
    },
}  # fmt: skip


@pytest.mark.parametrize("text", FORGED)
def test_a_record_of_another_shape_or_version_is_named(tmp_path, text):
    path = make(tmp_path, 5).path / "kerple.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | FORGED[text]))
    with pytest.raises(CheckpointError, match=re.escape(text)):
        Record.read(path.parent)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 9000, '{"format": ' + "9" * 5000])
def test_a_record_that_is_none_is_named(tmp_path, text):
    path = make(tmp_path, 5).path / "kerple.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="kerple.json: cannot be read"):
        Record.read(path.parent)


def test_the_state_of_the_loop_is_read_as_it_was_written(tmp_path):
    interval = {"steps": 2, "losses": [1.5, math.inf], "average_loss": 2.5, "owes_validation": True}
    path = make(tmp_path, 5).path / "kerple.json"
    changed = {"progress": COUNTERS | {"interval": interval}}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert Record.read(path.parent).progress.interval == interval


def test_unknown_entries_of_the_same_format_are_ignored(tmp_path):
    path = make(tmp_path, 5).path / "kerple.json"
    record = json.loads(path.read_text())
    record |= {"later": 1, "progress": record["progress"] | {"epoch": 2}}
    path.write_text(json.dumps(record))
    assert Record.read(path.parent).progress == TrainingProgress(5, 5, 200)


def test_what_differs_is_named_with_a_way_out(tmp_path):
    saved = make(tmp_path, 5)
    saved.require_same(RunDescription(model={"width": 1}), "model")
    with pytest.raises(CheckpointError, match="width: 1 in .*, 3 here.*Use the config"):
        saved.require_same(RunDescription(model={"width": 3}), "model")
    with pytest.raises(CheckpointError, match="pos_emb: None in the checkpoint, 'none' here"):
        saved.require_same(RunDescription(model={"pos_emb": "none"}), "model")
    saved.record.model.update(pos_emb=[[["none"], 2]], num_layers=2)
    saved.require_same(RunDescription(model={"pos_emb": "none", "num_layers": 2}), "model")


def test_weights_that_do_not_fit_are_all_listed(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model.pos = load("none")
    model.shape = SimpleNamespace(block=SimpleNamespace(gpt_j_residual=False))
    stored = {"0.weight": torch.zeros(3, 5), "0.bias": torch.zeros(3), "9.bias": torch.zeros(1)}
    saved = make(tmp_path, 1, stored)
    with pytest.raises(CheckpointError) as error:
        load_weights(model, saved)
    for text in (
        "0.weight: (3, 5) in the checkpoint, (3, 2) here",
        "1.weight: missing in the checkpoint",
        "9.bias: not in this model",
        "config.yml",
    ):
        assert text in str(error.value)


def test_a_damaged_or_foreign_folder_is_named(tmp_path):
    saved = make(tmp_path, 1)
    (saved.path / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt: cannot be read"):
        saved.weights()
    (saved.path / "kerple.json").write_text("{")
    with pytest.raises(CheckpointError, match="not written by this code, or it is damaged"):
        _ = Saved(tmp_path, saved.tag).record
