"""Test runs that are resumed in oddly named folders, with more ranks than numbers, or that log here
and there."""

from __future__ import annotations

import pytest

from tests.helpers.jobs import cell, rows, run_job, train_run, write_config, write_shards
from tests.helpers.launch import run_ranks

KEYS = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "eval_iters": 0,
    "save_interval": 3,
    "train_iters": 4,
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("text"))


def train(groups, run, prefix, keys, source=None):
    train_run(groups, run, prefix, KEYS | keys, source=source, step=3)


def test_a_folders_name_is_no_pattern(tmp_path, prefix):
    """DeepSpeed puts paths into patterns: `seed[1]` would find the files of `seed1`."""
    stage0, other = cell(0, "fp32"), {"seed": 2}
    run_ranks(1, train, tmp_path / "seed1", prefix, stage0)
    run_ranks(1, train, tmp_path / "seed2", prefix, stage0 | other)
    odd = tmp_path / "seed[1]"
    run_ranks(1, train, odd, prefix, stage0 | other, tmp_path / "seed2")
    assert rows(odd) == rows(tmp_path / "seed2") != rows(tmp_path / "seed1")
    run_ranks(1, train, tmp_path / "stage1", prefix, cell(1, "fp32"))
    again = tmp_path / "a+b (stage*)"
    run_ranks(1, train, again, prefix, cell(3, "fp32"), tmp_path / "stage1")
    assert rows(again) == pytest.approx(rows(tmp_path / "stage1"), rel=1e-5)


def test_a_layout_with_a_rank_that_has_padding_alone(tmp_path, prefix):
    """Theta has two numbers and a group of its own, of which the second rank has no part."""
    keys = {"num_attention_heads": 2, "pos_emb": "alibi_learned", "theta_lr_multiplier": 10.0}
    run_ranks(1, train, tmp_path / "one", prefix, keys)
    run_ranks(2, train, tmp_path / "two", prefix, keys, tmp_path / "one")
    assert rows(tmp_path / "two") == pytest.approx(rows(tmp_path / "one"), rel=1e-5)
    run_ranks(2, train, tmp_path / "on", prefix, keys | {"train_iters": 5}, tmp_path / "two")
    assert rows(tmp_path / "on")[4] == pytest.approx(rows(tmp_path / "two")[4], rel=1e-5)


def log_on_one_rank(groups, folder, prefix):
    keys = {"eval_interval": 2, "eval_iters": 1, "save": str(folder / "run")}
    if groups.is_main:
        keys["tensorboard_dir"] = str(folder / "board")
    config = write_config(folder / f"{groups.rank}.yml", prefix, **KEYS | keys)
    groups.barrier()
    run_job(groups, config)


def test_ranks_may_log_differently(tmp_path, prefix):
    """The kernel's parameters are gathered for TensorBoard's pictures by all ranks."""
    run_ranks(2, log_on_one_rank, tmp_path, prefix)
    assert sorted(rows(tmp_path / "run", "validation/loss")) == [2, 4]
    assert list((tmp_path / "board").iterdir())
