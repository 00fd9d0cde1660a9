"""Test pipeline stages: one theta, the plain model's parameter names, bitwise resuming."""

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from megatron.config import load_config
from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from megatron.parallel import loss
from megatron.pretraining.run import Job
from tests.helpers.jobs import (
    STAGES,
    cell,
    digest,
    measured,
    rewind,
    rows,
    write_config,
    write_shards,
)
from tests.helpers.launch import call, run_ranks

BASE = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "save_interval": 3,
    "num_layers": 3,
    "seq_length_val": 24,
    "eval_lengths": [16, 40],
    "eval_lengths_interval": 4,
    "eval_tokens": 240,
}
ONE_STEP = {  # weights move by exactly their gradient
    "optimizer": {"type": "sgd", "params": {"lr": 1.0}},
    "lr_decay_style": "constant",
    "warmup": 0.0,
    "weight_decay": 0.0,
    "gradient_clipping": 0.0,
    "train_iters": 1,
}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
VARIANTS = {
    "alibi": {"pos_emb": "alibi"},
    "learned": {"pos_emb": "learned", "max_position_embeddings": 64},
    "gpt_j": {"gpt_j_residual": True, "gpt_j_tied": True, "activation": "geglu"},
    "recomputed": {
        **{"checkpoint_activations": True, "no_weight_tying": True, "output_layer_bias": True},
        **{"output_norms": True, "head_dim": 8},
    },
    "z_loss": {"z_loss": 0.1},
    "fp32 sums": {**cell(1, "bf16"), "data_types": {"grad_accum_dtype": "fp32"}},
}
IN_PIECES = mock.patch.object(loss, "LOGITS_AT_ONCE", 4 * 264 * 5)
"""Computes the losses of 5 positions of each micro-batch at a time."""
RESUMED = {
    "pp2-bf16": {"pipe_parallel_size": 2, **cell(1, "bf16")},
    "pp3-untied": {"pipe_parallel_size": 3, "no_weight_tying": True},
    "pp2-tp2": {"pipe_parallel_size": 2, "model_parallel_size": 2, "sequence_parallel": True},
}


def train(groups, folder, prefix, name, **changes):
    run, config = folder / name, folder / f"{name}.yml"
    if groups.is_main:
        write_config(config, prefix, save=str(run), load=str(run), **(BASE | changes))
    groups.barrier()
    job = Job(load_config([config], world_size=groups.world_size), groups)
    job.run()
    return [name for name, _ in job.model.named_parameters()]


def one(groups, folder, prefix):
    names = train(groups, folder, prefix, "one-step-plain", **ONE_STEP)
    train(groups, folder, prefix, "plain")
    for name, changes in VARIANTS.items():
        train(groups, folder, prefix, f"{name}-plain", **changes)
    for stage in STAGES:
        with IN_PIECES:
            keys = {**VARIANTS["z_loss"], **cell(stage, "fp32")}
            train(groups, folder, prefix, f"pieces-{stage}", **keys)
    return names


def several(groups, folder, prefix):
    names = []
    if groups.world_size == 2:
        split = {"pipe_parallel_size": 2}
        names = train(groups, folder, prefix, "one-step-pipe", **(ONE_STEP | split))
        for name, changes in VARIANTS.items():
            with IN_PIECES if name == "z_loss" else nullcontext():
                train(groups, folder, prefix, f"{name}-pipe", **(changes | split))
        for drop in ("a", "b"):
            train(groups, folder, prefix, f"dropout-{drop}", **(DROPOUT | split))
    for name, changes in RESUMED.items():
        ranks = changes["pipe_parallel_size"] * changes.get("model_parallel_size", 1)
        if ranks != groups.world_size:
            continue
        train(groups, folder, prefix, name, **(DROPOUT | changes))
        if groups.is_main:
            rewind(folder / name, folder / f"{name}-broken", step=3)
        groups.barrier()
        train(groups, folder, prefix, f"{name}-broken", **(DROPOUT | changes))
    return names


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return (folder, parameter names of the plain model, parameter names of each stage)."""
    folder = tmp_path_factory.mktemp("pipeline")
    prefix = write_shards(folder)
    (plain,) = run_ranks(1, one, folder, prefix)
    stages = run_ranks(2, several, folder, prefix)
    for ranks in (3, 4):
        run_ranks(ranks, several, folder, prefix)
    return folder, plain, stages


def test_the_job_has_one_theta_and_the_plain_models_names(jobs):
    _, plain, stages = jobs
    assert [name for stage in stages for name in stage if "theta" in name] == ["embedding.theta"]
    tied = "embedding.word_embeddings.weight"
    assert tied in stages[0] and tied in stages[1]
    assert sorted([*stages[0], *stages[1]]) == sorted([*plain, tied])


def test_thetas_gradient_is_the_sum_over_all_stages(jobs):
    folder, *_ = jobs
    plain, pipe = (Saved(folder / f"one-step-{kind}", "global_step1").weights()
                   for kind in ("plain", "pipe"))  # fmt: skip
    start = initial_theta(folder)
    moved = plain["embedding.theta"] - start
    assert (moved != 0).sum() >= 6, "theta got no gradient: the test tests nothing"
    assert torch.equal(pipe["embedding.theta"], plain["embedding.theta"])
    for name, weight in plain.items():
        torch.testing.assert_close(pipe[name], weight, rtol=1e-6, atol=1e-7, msg=name)


def initial_theta(folder):
    from megatron.engine.build import plan_of
    from megatron.model import GPT

    config = load_config([folder / "one-step-plain.yml"])
    return GPT(plan_of(config, 257, device_type="cpu")).theta.detach()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pipeline_trains_and_evaluates_the_plain_model(jobs, variant):
    folder, *_ = jobs
    plain, pipe = folder / f"{variant}-plain", folder / f"{variant}-pipe"
    tolerance = 1e-2 if variant == "fp32 sums" else 2e-6
    by_length = ("validation/loss_at_16", "validation/loss_at_40")
    for name in ("train/loss", "train/grad_norm", "validation/loss", *by_length):
        ours, truth = rows(pipe, name), rows(plain, name)
        assert ours.keys() == truth.keys() and truth
        for step, value in truth.items():
            assert ours[step] == pytest.approx(value, abs=tolerance, rel=tolerance), (name, step)
    tables = [measured(run) for run in (plain, pipe)]
    for a, b in zip(*tables, strict=True):
        assert a == pytest.approx(b, rel=1e-2 if variant == "fp32 sums" else 1e-4)
    assert len(tables[0]) == 2


@pytest.mark.parametrize("stage", STAGES)
def test_losses_in_pieces_train_the_same_model(jobs, stage):
    """The term of `z_loss` is part of the training loss alone."""
    folder, *_ = jobs
    for name in ("train/loss", "train/grad_norm", "validation/loss"):
        truth = rows(folder / "z_loss-plain", name)
        assert rows(folder / f"pieces-{stage}", name) == pytest.approx(truth, rel=2e-6), name
    first, plain = (rows(folder / run)[1] for run in ("z_loss-plain", "plain"))
    assert first == pytest.approx(plain + 0.1 * math.log(264) ** 2, rel=0.01)


def test_one_process_generates_with_a_pipelines_checkpoint(jobs):
    """Two runs whose weights are equal to 1e-6 give equal texts."""
    folder, *_ = jobs
    options = ("--prompt", "abcd", "--temperature", 0, "--max-new-tokens", 40, "--json")
    plain, pipe = (
        call("generate.py", "--load", folder / f"one-step-{kind}", *options).splitlines()
        for kind in ("plain", "pipe")
    )
    assert "trained in 2 pipeline stage(s) x 1 tensor-parallel" in pipe[0]
    assert pipe[1] == plain[1] and pipe[1].startswith('{"prompt": "abcd", "text": ')


def test_dropout_is_repeatable_and_changes_the_loss(jobs):
    folder, *_ = jobs
    assert rows(folder / "dropout-a") == rows(folder / "dropout-b") != rows(folder / "plain")


@pytest.mark.parametrize("run", RESUMED)
def test_resuming_is_bitwise_identical(jobs, run):
    folder, *_ = jobs
    whole, broken = folder / run, folder / f"{run}-broken"
    assert newest(whole).tag == newest(broken).tag == "global_step6"
    assert digest(whole) == digest(broken)
    assert rows(whole) == rows(broken)
    assert rows(whole, "validation/loss") == rows(broken, "validation/loss")


@pytest.mark.parametrize("run", RESUMED)
def test_its_checkpoint_holds_the_whole_model(jobs, run):
    folder, plain, _ = jobs
    weights = Saved(folder / run, "global_step6").weights()
    extra = {"output.weight"} if "untied" in run else set()
    assert weights.keys() == {*plain, *extra}
    truth = Saved(folder / "plain", "global_step6").weights()
    assert all(weights[name].shape == truth[name].shape for name in truth)
    record = Saved(folder / run, "global_step6").record
    assert record.layout["pipe_parallel_size"] == RESUMED[run]["pipe_parallel_size"]
