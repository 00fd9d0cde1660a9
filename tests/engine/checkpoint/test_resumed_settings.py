"""Test which run a command continues, and with whose settings."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.helpers.jobs import digest, rows, write_run_config
from tests.helpers.launch import call


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prefix):
    """Return a config and a run of four steps with checkpoints at 2 and 4; nothing clips it."""
    keys = {"train_iters": 4, "save_interval": 2, "gradient_clipping": 0.0, "weight_decay": 0.0}
    keys |= {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "lr_decay_style": "constant"}
    keys |= {"train_micro_batch_size_per_gpu": 4, "eval_iters": 20, "eval_interval": 1}
    config, run = write_run_config(tmp_path_factory.mktemp("finished"), prefix, **keys)
    call("train.py", config)
    return config, run


def options(**changes):
    return [text for key, value in changes.items() for text in ("-o", f"{key}={value}")]


def test_a_resumed_run_clips_as_its_config_says(finished, tmp_path):
    config, run = finished
    copy = shutil.copytree(run, tmp_path / "run")
    call("train.py", config, *options(save=copy, load=copy, train_iters=5, gradient_clipping=1e-9))
    weights = [
        torch.load(copy / f"global_step{step}" / "mp_rank_00_model_states.pt", weights_only=False)
        for step in (2, 4, 5)
    ]
    unclipped, clipped = (
        max((b["module"][name] - a["module"][name]).abs().max().item() for name in a["module"])
        for a, b in zip(weights, weights[1:], strict=False)
    )
    assert unclipped > 1e-3 and clipped < 1e-6


def test_final_losses_are_those_of_the_step_that_the_run_has_taken(finished, tmp_path):
    config, run = finished
    copy = shutil.copytree(run, tmp_path / "run")
    text = call("train.py", config, *options(save=copy, load=copy, train_iters=3))
    assert "step 4 of 3: nothing to train" in text
    assert list(rows(copy, "final/valid_loss")) == [4]


def test_finetuning_does_not_go_on_with_another_run(finished, tmp_path):
    """Neither with a run that was trained, nor with one that was finetuned from other weights."""
    config, run = finished
    plain, tuned = shutil.copytree(run, tmp_path / "plain"), tmp_path / "tuned"
    call("train.py", config, *options(finetune="true", save=tuned, load=run, train_iters=2))
    for save, load, tag in ((plain, run / "global_step2", 4), (tuned, plain, 2)):
        before = digest(save)
        given = options(finetune="true", save=save, load=load, train_iters=9)
        text = call("train.py", config, *given, code=1)
        assert f"save: {save} holds a checkpoint already (global_step{tag})" in text
        assert digest(save) == before
