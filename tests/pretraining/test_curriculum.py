"""A curriculum of lengths: composed by hand, resumed in each stage, and in every layout."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.config import load_config
from megatron.engine.training.loop import train_step
from megatron.pretraining.run import Job
from tests.helpers.jobs import (
    all_but_speed,
    digest,
    rewind,
    rows,
    run_job,
    write_config,
    write_shards,
)
from tests.helpers.launch import run_ranks

STAGES = [[0, 4], [2, 8], [4, 16]]
LENGTHS = {1: 4, 2: 4, 3: 8, 4: 8, 5: 16, 6: 16}
"""The length of each step."""
WHOLE = {"eval_interval": 3, "save_interval": 1, "keep_last_n_checkpoints": None}
LAYOUTS = {
    "pipeline": {"pipe_parallel_size": 2},
    "tensor": {"model_parallel_size": 2},
    "sequence": {"model_parallel_size": 2, "sequence_parallel": True},
    "context": {"context_parallel_size": 2},
    "data": {"zero_optimization": {"stage": 2}},
}
INTERRUPTED = (1, 3, 5)
"""A step in the middle of each stage."""


def train(groups, folder, prefix, name, **changes):
    run = folder / name
    given = {"save": str(run), "load": str(run), "curriculum": STAGES, "train_batch_size": 8}
    config = folder / f"{name}.yml"
    if groups.is_main:
        write_config(config, prefix, **given | changes)
    groups.barrier()
    run_job(groups, config)


def composed_by_hand(groups, folder, prefix):
    """Take each step on sequences that are cut here. Write the losses, and the loss at one length.

    Nothing of the curriculum is in this config.
    """
    config = write_config(folder / "hand.yml", prefix, train_batch_size=8, eval_iters=0)
    job = Job(load_config([config]), groups)
    loader = job.data.training(index_samples=48, consumed=0)
    losses = []
    for length in LENGTHS.values():
        tokens = next(loader)
        pieces = [row[i : i + length + 1] for row in tokens for i in range(0, 16, length)]
        assert len(pieces) * length == tokens.shape[0] * 16
        loss, _ = train_step(job.engine, iter([np.stack(pieces)]), 1, groups)
        job.theta.project()
        losses.append(float(loss))
    np.save(folder / "hand.npy", losses)


def one_process(groups, folder, prefix):
    train(groups, folder, prefix, "whole", **WHOLE)
    for step in INTERRUPTED:
        rewind(folder / "whole", folder / f"after-{step}", step=step)
        train(groups, folder, prefix, f"after-{step}", **WHOLE)
    train(groups, folder, prefix, "full", curriculum=[])
    composed_by_hand(groups, folder, prefix)


def two_processes(groups, folder, prefix):
    for name, layout in LAYOUTS.items():
        train(groups, folder, prefix, name, eval_interval=3, **layout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curriculum")
    prefix = write_shards(folder)
    run_ranks(1, one_process, folder, prefix)
    run_ranks(2, two_processes, folder, prefix)
    return folder


def test_the_steps_equal_those_on_sequences_cut_by_hand(runs):
    assert [*rows(runs / "whole").values()] == np.load(runs / "hand.npy").tolist()
    full = rows(runs / "full")
    assert all(abs(full[step] - loss) > 1e-4 for step, loss in rows(runs / "whole").items())


@pytest.mark.parametrize("step", INTERRUPTED)
def test_a_run_resumes_in_the_middle_of_a_stage_bit_for_bit(runs, step):
    assert digest(runs / f"after-{step}") == digest(runs / "whole")
    assert all_but_speed(runs / f"after-{step}") == all_but_speed(runs / "whole")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process(runs, layout):
    truth = rows(runs / "whole")
    assert [*truth] == [*LENGTHS]
    # a few fp32 roundings of a loss near 5, in six steps
    assert rows(runs / layout) == pytest.approx(truth, abs=2e-6)
    truth = rows(runs / "whole", "validation/loss")
    assert [*truth] == [3, 6]
    assert rows(runs / layout, "validation/loss") == pytest.approx(truth, abs=2e-6)


def test_tokens_and_samples_are_those_of_a_run_without_stages(runs):
    for name in ("train/samples", "train/tokens"):
        assert rows(runs / "whole", name) == rows(runs / "full", name)
    assert rows(runs / "whole", "train/tokens")[6] == 6 * 8 * 16


def test_the_rate_of_operations_counts_the_length_of_each_step(runs):
    rate, tokens = (
        rows(runs / "whole", f"train/{name}") for name in ("tflops_per_device", "tokens_per_second")
    )
    for step, length in LENGTHS.items():
        flop = 6 * (2 * 12 * 32**2 + 264 * 32) + 12 * 2 * 32 * length
        assert rate[step] == pytest.approx(tokens[step] * flop / 1e12)
