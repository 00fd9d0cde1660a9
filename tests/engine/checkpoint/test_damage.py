"""Test damage in the newest checkpoint: it is reported, or an earlier one is used if allowed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.config import load_config
from megatron.engine.checkpoint import relayout
from megatron.engine.checkpoint.choose_start import choose_start, usable
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.errors import CheckpointError
from megatron.engine.training.schedule import AnnealingLR, schedule_of
from megatron.parallel.groups import build_groups
from megatron.run_folder import RunFolder
from tests.helpers.jobs import digest, rows, write_config, write_shards
from tests.helpers.launch import call

ALONE = build_groups(torch.device("cpu"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return (config, run folder, output) of a run of six steps with checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("damage")
    run = folder / "run"
    keys = {"save": str(run), "load": str(run), "save_interval": 3}
    config = write_config(
        folder / "c.yml", write_shards(folder), train_micro_batch_size_per_gpu=4, **keys
    )
    return config, run, call("train.py", config)


def flip(path):
    """Change one bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FAULTS = {
    "mp_rank_00_model_states.pt": (flip, "its checksum is wrong"),
    "rng_rank_00000.pt": (lambda path: path.unlink(), "missing"),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": (
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        "were written",
    ),
    "kerple.json": (lambda path: path.write_text(path.read_text()[:-2]), "cannot be read"),
}


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "run")
    return tmp_path / "run"


def test_an_intact_checkpoint_has_no_damage(finished):
    assert Saved(finished[1], "global_step6").damage(ALONE) is None
    record = json.loads((finished[1] / "global_step6" / "kerple.json").read_text())
    written = {p.name for p in (finished[1] / "global_step6").iterdir()} - {"kerple.json"}
    assert record["files"].keys() == written and len(written) >= 3


@pytest.mark.parametrize("name", FAULTS)
def test_the_damaged_file_is_named_with_the_reason_and_the_way_out(copy, name):
    damage, why = FAULTS[name]
    damage(copy / "global_step6" / name)
    with pytest.raises(CheckpointError) as error:
        usable(copy, ALONE, allow_fallback=False)
    text = str(error.value)
    assert str(copy / "global_step6" / name) in text and why in text
    assert f"resume from {copy / 'global_step3'} with --allow-fallback" in text
    saved, found = usable(copy, ALONE, allow_fallback=True)
    assert saved.tag == "global_step3" and why in found


def test_a_record_whose_numbers_changed_is_damaged(copy):
    path = copy / "global_step6" / "kerple.json"
    path.write_text(path.read_text().replace('"step": 6', '"step": 5'))
    assert "its checksum is wrong" in Saved(copy, "global_step6").damage(ALONE)


def test_a_record_of_a_newer_format_is_not_called_damaged(copy):
    path = copy / "global_step6" / "kerple.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    saved, found = usable(copy, ALONE, allow_fallback=True)
    assert saved.tag == "global_step6" and not found
    with pytest.raises(CheckpointError, match="is of format 2, written by version"):
        _ = saved.record


@pytest.mark.parametrize("key", ["format", "files"])
def test_a_changed_letter_in_the_key_checksum_is_damage(copy, key):
    """Records of this version have a format; earlier ones have files and no format."""
    path = copy / "global_step6" / "kerple.json"
    record = json.loads(path.read_text())
    record.pop({"format": "files", "files": "format"}[key])
    path.write_text(json.dumps(record).replace('"checksum"', '"checksvm"'))
    assert "its checksum is missing" in Saved(copy, "global_step6").damage(ALONE)


@pytest.mark.parametrize("named", ["", "global_step9"])
def test_a_damaged_latest_is_passed_over_only_when_allowed(copy, named):
    (copy / "latest").write_text(named)
    with pytest.raises(CheckpointError, match="let train.py --allow-fallback"):
        usable(copy, ALONE, allow_fallback=False)
    saved, found = usable(copy, ALONE, allow_fallback=True)
    assert saved.tag == "global_step6" and f"names {named!r}" in found


def test_what_lies_beyond_latest_is_taken_last(copy):
    """If `latest` names a damaged checkpoint between two intact ones, the earlier one is used."""
    shutil.copytree(copy / "global_step3", copy / "global_step9")
    flip(copy / "global_step6" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="resume from .*global_step3 with"):
        usable(copy, ALONE, allow_fallback=False)
    assert usable(copy, ALONE, allow_fallback=True)[0].tag == "global_step3"
    flip(copy / "global_step3" / "mp_rank_00_model_states.pt")
    assert usable(copy, ALONE, allow_fallback=True)[0].tag == "global_step9"


def test_a_conversion_that_fails_says_so_and_leaves_nothing(finished, copy, tmp_path, monkeypatch):
    def full(arguments):
        Path(arguments.output_folder, "tmp").mkdir()
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(relayout.ds_to_universal, "main", full)
    with pytest.raises(CheckpointError, match="no space left on device; .* MB are free"):
        scratch, changed = tmp_path / "scratch", "zero_stage 1 -> 2"
        relayout.restore(None, ALONE, Saved(copy, "global_step6"), scratch, {}, changed)
    assert not (tmp_path / "scratch").exists()


def test_no_intact_checkpoint_at_all_is_an_error(copy):
    for tag in ("global_step3", "global_step6"):
        flip(copy / tag / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="holds no intact checkpoint"):
        usable(copy, ALONE, allow_fallback=True)


def test_another_batch_size_is_reported(finished):
    for micro, warns in ((4, False), (8, True)):
        config = load_config([finished[0]], [f"train_micro_batch_size_per_gpu={micro}"])
        text = choose_start(config, ALONE, 24).text
        assert ("train_batch_size is 8, and was 4 until now" in text) == warns
        assert f"resuming from {finished[1] / 'global_step6'}" in text


@pytest.mark.parametrize(("key", "value", "before"), [
    ("sliding_window_width", "[[[8, none], all]]", "null"),
    ("reset_attention_mask", "true", "false"),
])  # fmt: skip
def test_attention_to_other_tokens_is_reported(finished, key, value, before):
    assert key not in choose_start(load_config([finished[0]]), ALONE, 24).text
    text = choose_start(load_config([finished[0]], [f"{key}={value}"]), ALONE, 24).text
    assert f"write {key}: {before} for them" in text and text.count("until now") == 1


def test_another_runs_folder_is_read_and_never_written(finished, tmp_path, monkeypatch):
    """A checkpoint of another run is converted in this job's own folder `save`."""
    seen = []
    monkeypatch.setattr(relayout, "restore", lambda *args: seen.append(args[2:4]))
    config = load_config([finished[0]], [f"save={tmp_path / 'own'}"])
    start = choose_start(config, ALONE, 24)
    record = Saved(finished[1], "global_step6").record
    layout = record.layout | {"data_parallel_size": 2}
    run = RunDescription(model=record.model, data=record.data, layout=layout)
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    engine = SimpleNamespace(optimizer=SimpleNamespace())
    start.finish(engine, AnnealingLR(optimizer, schedule_of(config)), ALONE, run)
    ((source, scratch),) = seen
    assert source == Saved(finished[1], "global_step6") and scratch.parent == tmp_path / "own"


def test_train_stops_at_damage_and_goes_on_when_allowed(finished, copy):
    config, run, text = finished
    assert f"saved {run / 'global_step6'}, training waited " in text
    flip(copy / "global_step6" / "mp_rank_00_model_states.pt")
    where = ["-o", f"save={copy}", "-o", f"load={copy}"]
    text = call("train.py", config, *where, code=1)
    assert "is damaged" in text and "--allow-fallback" in text and "Traceback" not in text
    text = call("train.py", config, *where, "--allow-fallback")
    assert f"resuming from {copy / 'global_step3'} (passed over: " in text
    [aside] = copy.glob("global_step6.passed-over-*")
    assert f"{copy / 'global_step6'} is later than global_step3: renamed to {aside.name}" in text
    assert (aside / "kerple.json").exists()
    assert digest(copy) == digest(run)
    assert rows(copy) == rows(run)


def test_damage_that_an_early_record_does_not_cover_is_named(finished, copy):
    """Checkpoints of early versions have no checksums, but some damage is noticed all the same."""
    record = json.loads((copy / "global_step6" / "kerple.json").read_text())
    del record["checksum"], record["files"], record["format"]
    (copy / "global_step6" / "kerple.json").write_text(json.dumps(record))
    path = copy / "global_step6" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:3000])
    where = ["-o", f"save={copy}", "-o", f"load={copy}", "-o", "train_iters=7"]
    text = call("train.py", finished[0], *where, code=1)
    assert "global_step6: cannot be loaded on rank 0" in text and "Traceback" not in text
    assert f"write the name of an older checkpoint into {copy / 'latest'}" in text


def test_a_course_that_is_given_up_does_not_count(finished, copy):
    """After `latest` is set back to step 3, step 6 neither counts as kept nor as a fallback."""
    (copy / "latest").write_text("global_step3")
    where = ["-o", f"save={copy}", "-o", f"load={copy}", "-o", "keep_last_n_checkpoints=2"]
    text = call("train.py", finished[0], *where, "-o", "hidden_size=64", code=1)
    assert "hidden_size" in text and RunFolder(copy).tags() == ["global_step3", "global_step6"]
    call("train.py", finished[0], *where, "-o", "train_iters=3")  # with no step to train
    assert RunFolder(copy).tags() == ["global_step3", "global_step6"]
    more = ["-o", "train_iters=8", "-o", "save_interval=5", "-o", "lr_decay_iters=6"]
    text = call("train.py", finished[0], *where, *more)
    [aside] = copy.glob("*.passed-over-*")
    assert f"{copy / 'global_step6'} is later than global_step3: renamed to {aside.name}" in text
    assert RunFolder(copy).tags() == ["global_step5", "global_step8"]
    (copy / "latest").write_text(aside.name)
    text = call("train.py", finished[0], *where, *more)  # resumes from the renamed folder
    assert f"resuming from {aside}" in text and len([*copy.glob("*.passed-over-*")]) == 2
