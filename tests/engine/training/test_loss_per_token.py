"""The loss is the mean over the targets of a step, however they are divided among micro-batches.

The task `copy` has examples of 1 to 10 digits, so micro-batches differ in the number of targets.
"""

from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron.config import load_config
from megatron.engine.job_data import JobData
from megatron.engine.open_run import open_run
from megatron.engine.training.batches import Counting, next_batches
from megatron.parallel.groups import build_groups
from megatron.parallel.loss import mean_loss
from tests.helpers.jobs import BASE, digest, rows, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks
from tests.helpers.paths import ROOT

COPY = yaml.safe_load((ROOT / "configs/tasks/copy.yml").read_text()) | {
    "train_batch_size": 8,
    "train_iters": 30,
    "log_interval": 1,
    "eval_interval": 15,
    "eval_iters": 2,
    "eval_lengths": [],
    # With a small eps, Adam would scale up the rounding of a gradient that is truly 0 (key biases).
    "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.9, 0.98], "eps": 1e-3}},
}
TEXT: dict[str, Any] = {
    "eod_mask_loss": True,
    "train_batch_size": 8,
    "train_iters": 8,
    "seq_length": 48,
}
TEXT |= {"optimizer": COPY["optimizer"]}
TOGETHER = "8"
DIVIDED = {  # name: (processes, micro-batch, keys)
    TOGETHER: (1, 8, {}),
    "4 + 4": (1, 4, {}),
    "1 x 8": (1, 1, {"zero_optimization": {"stage": 1}}),
    "two ranks": (2, 2, {"zero_optimization": {"stage": 2}}),
    "two stages": (2, 2, {"pipe_parallel_size": 2}),
    "two slices": (2, 4, {"context_parallel_size": 2}),
}
MEANS = {"calculate_per_token_loss": False}


def train(groups, folder, prefix):
    """Train the task and the text in all divisions for this number of processes."""
    for name, (processes, micro, keys) in DIVIDED.items():
        if processes != groups.world_size:
            continue
        keys = keys | {"train_micro_batch_size_per_gpu": micro}
        for kind, given in (("copy", COPY), ("text", BASE | TEXT | {"data_path": prefix})):
            for means in ({}, MEANS) if processes == 1 else ({},):
                run = folder / f"{kind} {name} {len(means)}"
                config = folder / f"{run.name}.yml"
                if groups.is_main:
                    config.write_text(yaml.safe_dump(given | keys | means | {"save": str(run)}))
                groups.barrier()
                run_job(groups, config)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("per_token")
    prefix = write_shards(folder)
    for processes in (1, 2):
        run_ranks(processes, train, folder, prefix)
    return folder


@pytest.mark.parametrize("kind", ["copy", "text"])
@pytest.mark.parametrize("name", DIVIDED)
def test_the_division_changes_neither_losses_nor_weights(runs, kind, name):
    ours, whole = runs / f"{kind} {name} 0", runs / f"{kind} {TOGETHER} 0"
    for metric in ("train/loss", "validation/loss"):
        expected = rows(whole, metric)
        assert rows(ours, metric) == pytest.approx(expected, abs=1e-6) and expected, metric
    weights = [open_run(run).model.state_dict() for run in (ours, whole)]
    for key, expected in weights[1].items():
        torch.testing.assert_close(weights[0][key], expected, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("kind", ["copy", "text"])
def test_a_step_of_one_micro_batch_is_the_same_under_both_settings(runs, kind):
    with_key, without = (runs / f"{kind} {TOGETHER} {means}" for means in (1, 0))
    assert digest(with_key) == digest(without) and rows(with_key) == rows(without)


def test_the_published_loss_depends_on_the_division(runs):
    whole, divided = (rows(runs / f"copy {name} 1") for name in (TOGETHER, "1 x 8"))
    assert divided[30] < whole[30] - 0.05  # the issue: 2.056 and 2.213 after 30 steps


def test_a_step_of_the_published_loss_is_the_mean_of_the_micro_batches():
    arrays = [np.array([[1, 2, 3, ~4]]), np.array([[~1, ~2, ~3, 4]])]
    losses = [torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[0.0, 0.0, 7.0]])]
    groups = build_groups(torch.device("cpu"))

    def mean(counting):
        batches = next_batches(iter(arrays), 2, groups, counting)
        found = zip(losses, batches, strict=True)
        return sum(mean_loss(x, targets, divisor) for x, (_, targets, divisor) in found) / 2

    assert mean(Counting()) == (1.5 + 7) / 2 and mean(Counting(per_token=True)) == (3 + 7) / 3
    after_two = Counting(uncounted_after=2, per_token=True)
    *_, divisor = next(next_batches(iter(arrays), 2, groups, after_two))
    assert divisor == 1.0  # 3 follows 2, so 2 targets are left
    nothing = [np.full((1, 4), ~1)] * 2
    *_, divisor = next(next_batches(iter(nothing), 2, groups, after_two))
    assert divisor == 0.5  # not 0


@pytest.mark.parametrize(
    ("changes", "per_token"),
    [({}, False), ({"eod_mask_loss": True}, True), ({"eod_mask_loss": True} | MEANS, False)],
)
def test_text_counts_per_token_only_where_targets_are_masked(tmp_path, changes, per_token):
    config = write_config(tmp_path / "c.yml", write_shards(tmp_path), train_batch_size=8, **changes)
    data = JobData(load_config([config]), build_groups(torch.device("cpu")))
    assert data.counting.per_token is per_token
    assert (data.counting.uncounted_after is None) == (not changes)
