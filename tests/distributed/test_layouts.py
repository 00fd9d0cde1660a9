"""Test that all ZeRO stages, precisions and numbers of ranks train alike and resume bit for bit.

All cells of a world size run in one process group, one after the other, so that DeepSpeed is
imported once. The tests then read the files that the jobs wrote.
"""

import math

import pytest
import torch

from megatron.engine.checkpoint.record import TrainingProgress
from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from tests.helpers.jobs import (
    PRECISIONS,
    STAGES,
    cell,
    digest,
    rewind,
    rows,
    run_job,
    write_config,
    write_shards,
)
from tests.helpers.launch import run_ranks

CELLS = [(stage, precision) for stage in STAGES for precision in PRECISIONS]
SOURCES = {"broken": "whole", "dropout-broken": "dropout"}
BATCH = {1: (4, 2), 2: (2, 2)}  # ranks -> (micro batch, accumulation): 8 samples a step


def name(world_size, stage, precision):
    return f"w{world_size}-z{stage}-{precision}"


def all_cells(groups, folder, prefix):
    """Train every cell with and without an interruption after step 3."""
    micro, accumulation = BATCH[groups.world_size]
    for stage, precision in CELLS:
        run = folder / name(groups.world_size, stage, precision)
        for kind in ("whole", "broken", "dropout", "dropout-broken"):
            target = run.with_name(f"{run.name}-{kind}")
            source = run.with_name(f"{run.name}-{SOURCES.get(kind)}")
            if kind.endswith("broken") and groups.is_main:
                rewind(source, target, step=3)
            dropout = 0.2 if kind.startswith("dropout") else 0.0
            changes = cell(stage, precision) | {
                "save": str(target),
                "load": str(target),
                "save_interval": 3,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": accumulation,
                "eval_iters": 1,  # two micro-batches
                "hidden_dropout": dropout,
                "attention_dropout": dropout,
            }
            config = folder / f"{target.name}.yml"
            if groups.is_main:
                write_config(config, prefix, **changes)
            groups.barrier()
            run_job(groups, config)
        tuned = run.with_name(f"{run.name}-tuned")
        config = folder / f"{tuned.name}.yml"
        if groups.is_main:
            changes |= {
                "save": str(tuned),
                "load": str(run.with_name(f"{run.name}-whole")),
                "finetune": True,
                "train_iters": 3,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
            }
            write_config(config, prefix, **changes)
        groups.barrier()
        run_job(groups, config)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    prefix = write_shards(folder)
    for world_size in (1, 2):
        run_ranks(world_size, all_cells, folder, prefix)
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_every_cell_follows_one_fp32_process(runs, world_size, stage, precision):
    truth = rows(runs / f"{name(1, 1, 'fp32')}-whole")
    losses = rows(runs / f"{name(world_size, stage, precision)}-whole")
    assert sorted(losses) == sorted(truth) == list(range(1, 7))
    # 2e-6 is a few fp32 roundings of a loss near 5 after six steps; bf16 has 3 digits
    tolerance = 2e-6 if precision == "fp32" else 2e-2
    for step, loss in truth.items():
        assert losses[step] == pytest.approx(loss, abs=tolerance), step
    norms = rows(runs / f"{name(world_size, stage, precision)}-whole", "train/grad_norm")
    truth = rows(runs / f"{name(1, 1, 'fp32')}-whole", "train/grad_norm")
    for step, norm in truth.items():
        assert norms[step] == pytest.approx(norm, rel=1e-4 if precision == "fp32" else 5e-2), step


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_finetuning_starts_from_the_weights_and_keeps_them(runs, world_size, stage, precision):
    run = name(world_size, stage, precision)
    before, after = rows(runs / f"{run}-whole"), rows(runs / f"{run}-tuned")
    assert list(after) == [1, 2, 3]
    for loss in after.values():  # a rate of 1e-5 moves nothing: all three are the trained model's
        assert loss < before[1] - 0.5


def test_training_learns_something(runs):
    losses = rows(runs / f"{name(1, 1, 'fp32')}-whole")
    assert losses[6] < losses[1] - 0.5


@pytest.mark.parametrize("kind", ["whole", "dropout"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_resuming_is_bitwise_identical(runs, world_size, stage, precision, kind):
    run = name(world_size, stage, precision)
    whole = runs / f"{run}-{kind}"
    broken = runs / f"{run}-{'broken' if kind == 'whole' else 'dropout-broken'}"
    assert newest(whole).tag == newest(broken).tag == "global_step6"
    assert digest(whole) == digest(broken)
    assert rows(whole) == rows(broken)
    assert rows(whole, "validation/loss") == rows(broken, "validation/loss")


def test_dropout_changes_the_loss_and_ranks_draw_differently(runs):
    plain = rows(runs / f"{name(2, 1, 'fp32')}-whole")
    dropped = rows(runs / f"{name(2, 1, 'fp32')}-dropout")
    assert plain[1] != dropped[1]
    folder = runs / f"{name(2, 1, 'fp32')}-dropout" / "global_step6"
    states = [torch.load(folder / f"rng_rank_0000{r}.pt", weights_only=True) for r in (0, 1)]
    assert not torch.equal(states[0]["cpu"], states[1]["cpu"])


@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_weights_can_be_read_without_an_engine(runs, stage, precision, capfd):
    weights = Saved(runs / f"{name(2, stage, precision)}-whole", "global_step6").weights()
    assert capfd.readouterr() == ("", "")  # of ZeRO-3, DeepSpeed would show progress bars
    truth = Saved(runs / f"{name(1, 1, 'fp32')}-whole", "global_step6").weights()
    assert weights.keys() == truth.keys()
    for key, value in truth.items():
        close = (weights[key].float() - value).detach()
        # Adam turns a sign flip of a tiny bf16 gradient into a whole step of 0.01
        assert close.abs().max() < (1e-5 if precision == "fp32" else 0.1), key
        assert math.isfinite(close.abs().max())


def test_progress_is_recorded(runs):
    record = Saved(runs / f"{name(2, 1, 'fp32')}-whole", "global_step6").record
    assert record.progress == TrainingProgress(6, 48, 48)
    assert record.layout["data_parallel_size"] == 2
