"""A gradient that is not finite ends the run, in each precision, ZeRO stage and pipeline stage.

In most of these settings, DeepSpeed drops the update of such a step by itself and says nothing.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config import load_config
from megatron.config.sections.training import TrainingConfig
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import BadLossError, DivergedError
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.bad_loss import LossGuard
from megatron.engine.training.hooks import Step
from megatron.pretraining.run import Job
from tests.helpers.jobs import PRECISIONS, STAGES, cell, rows, write_run_config, write_shards
from tests.helpers.launch import run_ranks

PIPELINE = {"pipe_parallel_size": 2}
KINDS = [*((f"zero{stage}", stage, {}, 1) for stage in STAGES)]
KINDS += [("first stage", 1, PIPELINE, 0), ("last stage", 1, PIPELINE, 1)]
CELLS = {
    f"{precision} {name}": (cell(stage, precision) | keys, rank)
    for precision in PRECISIONS
    for name, stage, keys, rank in KINDS
}
FIRST_BAD = 4


def spoiled(groups, config, rank):
    """Train while one weight's gradient is NaN on `rank`, from step `FIRST_BAD` on.

    Returns:
        The text of the `DivergedError` that ends the run.
    """
    job = Job(load_config([config], world_size=groups.world_size), groups)

    def spoil(gradient):
        return gradient * math.nan if job.engine.global_steps >= FIRST_BAD - 1 else gradient

    if groups.rank == rank:
        weights = dict(job.model.named_parameters())
        weights[next(name for name in weights if "dense" in name)].register_hook(spoil)
    try:
        job.run()
    except DivergedError as error:
        return str(error)
    return f"no error after {job.engine.skipped_steps} dropped updates"


def all_cells(groups, cells):
    return [spoiled(groups, config, rank) for config, rank in cells]


def test_it_ends_the_run_in_every_mode(tmp_path):
    prefix, cells = write_shards(tmp_path), {}
    for name, (keys, rank) in CELLS.items():
        keys = {
            "train_batch_size": 4,
            "save_interval": 2,
            "log_interval": 5,
            "eval_iters": 0,
        } | keys
        cells[name] = (*write_run_config(tmp_path / name, prefix, **keys), rank)
    found = run_ranks(2, all_cells, [(config, rank) for config, _, rank in cells.values()])
    for name, *texts in zip(cells, *found, strict=True):
        for text in texts:
            assert "the norm of the gradient is not finite at step 4, samples 12 to 15" in text, (
                name
            )
        run = cells[name][1]
        assert newest(run).record.progress.step == 2 and rows(run) == {}, name


@pytest.fixture
def judged():
    """Return a function from steps on a GPU to the error of each: its text, or ""."""

    def judge(steps, **keys):
        engine: Any = SimpleNamespace()
        groups = SimpleNamespace(
            world_size=1, sum_over_job=lambda loss: loss, device=torch.device("cuda")
        )
        training = TrainingConfig(train_iters=9, **keys)
        guard = LossGuard(engine, groups, training, RunLog(None, is_main=False))
        found = []
        for number, (norm, applied, changes) in enumerate(steps, 1):
            engine.was_step_applied = lambda applied=applied: applied
            flags = dict.fromkeys(("last", "leaves", "logs", "validates", "saves"), False) | changes
            step = Step(number, 0.1, torch.ones(()), norm, 4 * number, 4, **flags)
            try:
                guard.after_step(step)
                found.append("")
            except BadLossError as error:
                found.append(str(error).partition(";")[0])
        return found

    return judge


BAD = torch.tensor(math.nan)
GOOD = torch.tensor(1.0)


@pytest.mark.parametrize("reads", ["logs", "saves", "validates"])
def test_a_norm_on_a_gpu_is_judged_before_the_next_line_or_checkpoint(judged, reads):
    steps = [(GOOD, True, {}), (BAD, True, {}), (GOOD, True, {}), (GOOD, True, {reads: True})]
    *others, last = judged([*steps, (GOOD, True, {reads: True})])[:4]
    assert others == ["", "", ""]
    assert last == (
        "the norm of the gradient is not finite at step 4, samples 0 to 15 of the split train"
    )


def test_a_dropped_update_is_told_at_once(judged):
    assert "at step 2, samples 0 to 7 " in judged([(GOOD, True, {}), (BAD, False, {})])[1]
    assert judged([(None, True, {"saves": True}), (None, False, {})])[1].endswith(
        "samples 4 to 7 of the split train"
    )


@pytest.mark.parametrize(("scale", "ends"), [(0, False), (128, True)])
def test_an_overflow_counts_where_the_loss_scale_cannot_fall(judged, scale, ends):
    steps = [(math.inf, False, {"saves": True})]
    assert judged(steps, precision="fp16", loss_scale=scale) == [
        "the norm of the gradient is not finite at step 1, samples 0 to 3 of the split train" * ends
    ]
