"""Test that a run with other positions starts with the same weights in every layout."""

from contextlib import redirect_stdout

import pytest
import torch

from megatron.engine.checkpoint.saved_checkpoints import newest
from tests.helpers.jobs import cell, rows, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks

BASE = {"init_method_std": 0.4, "train_batch_size": 8, "eval_iters": 0, "train_iters": 1}
BASE |= {"make_vocab_size_divisible_by": 16, "no_weight_tying": True, "pos_emb": "rotary"}
CHANGES = {
    "added": {"pos_emb": "rotary + kerple_log"},
    "fitted": {"pos_emb": "kerple_log3", "retrofit_init": "fit"},
}
LAYOUTS = {f"zero{stage}": cell(stage, "fp32") for stage in (1, 2, 3)}
LAYOUTS |= {"tp2": {"model_parallel_size": 2}, "pp2": {"pipe_parallel_size": 2}}


def train(groups, folder, prefix, layouts):
    """Train the source alone, then a run of each layout and change of positions."""
    runs = {"source": {}} if groups.world_size == 1 else {}
    for name, keys in layouts.items():
        for change, positions in CHANGES.items():
            start = {"load": str(folder / "source"), "finetune": True}
            runs[f"{name}-{change}"] = keys | positions | start
    for name, keys in runs.items():
        config = folder / f"{name}.yml"
        if groups.is_main:
            write_config(config, prefix, **BASE | keys, save=str(folder / name))
        groups.barrier()
        with (folder / f"{name}.{groups.rank}.log").open("w") as log, redirect_stdout(log):
            run_job(groups, config)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrofit_layouts")
    prefix = write_shards(folder)
    run_ranks(1, train, folder, prefix, {"alone": {}})
    run_ranks(2, train, folder, prefix, LAYOUTS)
    return folder


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_with_the_same_weights_and_loss(runs, layout, change):
    """The learning rate of step 1 is 0, so its checkpoint has the first weights."""
    alone, here = (newest(runs / f"{name}-{change}").weights() for name in ("alone", layout))
    assert alone.keys() == here.keys()
    for name, weight in alone.items():
        assert torch.equal(weight, here[name]), name
    losses = [rows(runs / f"{name}-{change}")[1] for name in ("alone", layout)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    logs = [(runs / f"{name}-{change}.0.log").read_text() for name in ("alone", layout)]
    (said,) = {line for text in logs for line in text.splitlines() if "as the check" in line}
    assert f"{losses[0]:.4f} now" in said
