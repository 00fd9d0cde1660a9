"""Test runs that start from a checkpoint of another run by configuration alone."""

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
