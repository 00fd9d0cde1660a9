"""Test runs that start from a checkpoint of another run by configuration alone."""

import pytest

from megatron.run_folder import RunFolder
from tests.helpers.jobs import digest, rows, write_run_config, write_shards
from tests.helpers.launch import call


def test_a_branch_decays_from_a_stable_checkpoint_of_another_run(tmp_path):
    """A branch from step 3 equals the run that was going to decay there, bit for bit."""
    prefix = write_shards(tmp_path)

    def config_at(name, **changes):
        return write_run_config(
            tmp_path / name, prefix, train_micro_batch_size_per_gpu=4, **changes
        )

    wsd = {"lr_decay_style": "wsd", "warmup": 0, "train_iters": 4, "wsd_decay_ratio": 0.5}
    config, whole = config_at("whole", **wsd)
    call("train.py", config)
    stable = {"lr_decay_style": "constant", "warmup": 0, "train_iters": 3, "save_interval": 2}
    config, run = config_at("stable", **stable)
    call("train.py", config)
    branch = tmp_path / "branch"
    start = ["-o", f"load={run / 'global_step2'}", "-o", f"save={branch}", "-o", "train_iters=4"]
    decay = ["-o", "lr_decay_style=wsd", "-o", "wsd_decay_ratio=0.5"]
    text = call("train.py", config, *start, *decay)
    assert f"resuming from {run / 'global_step2'}" in text
    assert rows(branch, "train/lr") == {3: 0.01, 4: 0.005}
    assert digest(branch) == digest(whole)
    text = call("train.py", config, *start[:2], "-o", f"save={run / 'global_step2'}", code=1)
    assert "is one checkpoint; name the folder that holds it" in text


def test_a_stopped_branch_resumes_by_the_same_command(tmp_path):
    keys = {"train_micro_batch_size_per_gpu": 4, "train_iters": 3, "save_interval": 2}
    config, run = write_run_config(tmp_path / "stable", write_shards(tmp_path), **keys)
    call("train.py", config)
    save, whole = tmp_path / "branch", tmp_path / "unbroken"
    options = ["-o", f"load={run / 'global_step2'}", "-o", "train_iters=6"]
    text = call("train.py", config, *options, "-o", f"save={save}", "-o", "exit_interval=4")
    assert f"resuming from {run / 'global_step2'}" in text and "leaving at step 4" in text
    again = ["-o", f"load={run}/./global_step2/", *options[2:]]
    text = call("train.py", config, *again, "-o", f"save={save}")
    assert f"resuming from {save / 'global_step4'}" in text
    call("train.py", config, *options, "-o", f"save={whole}")
    assert list(rows(save)) == [3, 4, 5, 6] and digest(save) == digest(whole)
    other = ["-o", f"load={run / 'global_step3'}", "-o", f"save={save}"]
    assert f"write `load: {save}` to continue" in call("train.py", config, *other, code=1)
    gone = ["-o", f"load={run / 'global_step1'}", "-o", f"save={tmp_path / 'other'}"]
    text = call("train.py", config, *gone, code=1)
    assert (
        f"load: {run / 'global_step1'} holds no checkpoint" in text and "leave `load` out" in text
    )
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    foreign = ["-o", f"load={tmp_path / 'hub'}", *gone[2:]]
    text = call("train.py", config, *foreign, code=1)
    assert "tools/import_hf.py imports a model of transformers" in text


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_before_the_first_step(tmp_path, beside):
    """As Pythia's, whose `extra_save_iters` begin with 0; a branch from it repeats all steps."""
    prefix = write_shards(tmp_path)
    keys = {"train_micro_batch_size_per_gpu": 4, "train_iters": 2, "extra_save_iters": [0, 1]}
    config, run = write_run_config(tmp_path / "whole", prefix, async_save=beside, **keys)
    call("train.py", config)
    assert RunFolder(run).tags() == ["global_step0", "global_step1", "global_step2"]
    branch = tmp_path / "branch"
    start = ["-o", f"load={run / 'global_step0'}", "-o", f"save={branch}"]
    assert f"resuming from {run / 'global_step0'}" in call("train.py", config, *start)
    assert digest(branch) == digest(run) and rows(branch) == rows(run)
    other = ["-o", f"save={tmp_path / 'other'}", "-o", "zero_optimization.stage=2"]
    text = call("train.py", config, start[0], start[1], *other, code=1)
    assert "another layout, and step 0 has no optimizer state to convert. Resume with" in text
