"""Test GPT-NeoX's checkpoints as `load`: evaluated on its batches, continued, fine-tuned."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.config import load_config
from megatron.data.samples.index import IndexArguments, build_sample_index
from megatron.data.samples.split import split_documents
from megatron.data.shards.reader import ShardReader
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.choose_start import choose_start
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.record import RunDescription, TrainingProgress
from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from megatron.engine.errors import CheckpointError
from megatron.engine.job_data import JobData
from megatron.engine.training.schedule import AnnealingLR, schedule_of
from megatron.evaluation.by_length import evaluate_checkpoint
from megatron.model import GPT
from megatron.parallel.groups import Groups
from tests.helpers.jobs import rows, write_config
from tests.helpers.launch import call
from tests.helpers.paths import FIXTURES

PUBLISHED = FIXTURES / "parity" / "models" / "kerple_log" / "checkpoint"
ALONE = Groups(0, 1, None, 0, 1, torch.device("cpu"))
SHAPE = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "seq_length_val": 24,
    "no_weight_tying": True,
    "make_vocab_size_divisible_by": 512,
    "split": "60,20,20",
    "eval_interval": 1000,
    "eval_iters": 6,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 0},
    "save_interval": 2,
    "keep_last_n_checkpoints": 1,
}


@pytest.fixture
def run(tmp_path):
    """Return the folder of a release, a copy of published files for `load` and `save`."""
    return Path(shutil.copytree(PUBLISHED, tmp_path / "release"))


def config_at(tmp_path, prefix, run, **changes):
    keys = SHAPE | {"load": str(run), "save": str(run)} | changes
    return write_config(tmp_path / "config.yml", prefix, **keys)


def published_loss(config, prefix, part, start, count):
    """Compute the mean loss over `count` batches from micro-step `start` on, without the loader."""
    b, t = config.batch, config.training
    shards = ShardReader(prefix)
    splits = split_documents(config.data.split, len(shards))
    length = config.model.seq_length_val
    wanted = t.eval_iters * b.train_batch_size
    index = build_sample_index(IndexArguments(shards.sizes, splits[part], wanted, length, t.seed))
    built = index.num_built
    text = np.concatenate([shards.get(d) for d in index.doc_idx])
    samples = np.stack([text[s * length : s * length + length + 1] for s in index.shuffle_idx])
    micro = b.train_micro_batch_size_per_gpu
    first = start % ((built - 1) // micro) * micro
    chosen = torch.from_numpy(samples[first : first + count * micro].astype(np.int64))
    model = GPT(plan_of(config, 257, device_type="cpu"))
    load_weights(model, newest(PUBLISHED))
    with torch.no_grad():
        return model(chosen[:, :-1], chosen[:, 1:]).mean().item(), first


@pytest.mark.parametrize("accumulation", [1, 2])
def test_train_iters_0_evaluates_the_published_batches(tmp_path, prefix, run, accumulation):
    path = config_at(tmp_path, prefix, run, train_iters=0, gradient_accumulation_steps=accumulation)
    before = sorted(p.name for p in run.rglob("*"))
    text = call("train.py", path)
    assert "evaluating" in text and "trained for 50000 steps" in text
    config = load_config([path])
    start = 50000 * accumulation // 1000 * 6
    for part, name in ((1, "valid"), (2, "test")):
        found = re.search(
            rf"{name} loss at iteration 50000: ([\d.]+) \| perplexity ([\d.]+) \| (\d+) sequences "
            r"of 24 tokens, from sample (\d+) on",
            text,
        )
        count = int(found[3]) // 2
        assert 0 < count <= 6 * accumulation
        loss, first = published_loss(config, prefix, part, start if part == 1 else 0, count)
        assert float(found[1]) == pytest.approx(loss, abs=2e-6) and int(found[4]) == first
        assert float(found[2]) == pytest.approx(math.exp(loss), rel=1e-5)
    after = {p.name for p in run.rglob("*")}
    assert after - set(before) == {"config.yml", "metrics.jsonl", "log.txt"}
    assert (run / "latest").read_text().strip() == "global_step50000"


def test_a_published_checkpoint_is_continued_from_its_step(tmp_path, prefix, run):
    path = config_at(tmp_path, prefix, run, train_iters=50004, lr_decay_iters=60000)
    text = call("train.py", path)
    assert "going on at step 50000" in text and "moments start at zero" in text
    assert list(rows(run)) == [50001, 50002, 50003, 50004]
    rate = 0.01 / 2 * (math.cos(math.pi * (48000 - 12000) / 60000) + 1)  # frozen since 48,000
    assert rows(run, "train/lr")[50001] == pytest.approx(rate)
    assert (run / "global_step50000").is_dir()  # what was downloaded is not pruned
    assert (run / "latest").read_text() == "global_step50004"
    samples = 50004 * 2
    expected = TrainingProgress(50004, consumed_samples=samples, train_samples=samples)
    assert Saved(run, "global_step50004").record.progress == expected
    text = call("train.py", path, "-o", "train_iters=50005")
    assert f"resuming from {run / 'global_step50004'}" in text and "moments" not in text


def test_finetune_starts_at_0_from_the_weights(tmp_path, prefix, run):
    path = config_at(tmp_path, prefix, run, train_iters=1)
    options = ["-o", "finetune=true", "-o", f"save={tmp_path / 'tuned'}"]
    text = call("train.py", path, *options)
    assert "starting at step 0 from the weights of" in text
    assert list(rows(tmp_path / "tuned")) == [1]


def test_evaluate_reads_the_folder(tmp_path, prefix, run):
    keys = {"train_iters": 1, "eval_tokens": 512, "eval_lengths": [16, 32]}
    config = load_config([config_at(tmp_path, prefix, run, **keys)])
    said = []
    evaluate_checkpoint(config, run, out=tmp_path / "out", say=said.append)
    assert said[0] == f"evaluating {run / 'global_step50000'}"
    assert len((tmp_path / "out" / "extrapolation.csv").read_text().splitlines()) == 3


def test_nothing_to_evaluate_is_an_error(tmp_path, prefix):
    config = load_config([config_at(tmp_path, prefix, tmp_path, train_iters=0)])
    with pytest.raises(CheckpointError, match="train_iters: 0 does nothing but"):
        choose_start(config, ALONE, 0)


def test_the_recorded_curve_is_taken_where_the_config_asks_for_it(tmp_path, prefix, run):
    """The release was trained with another learning rate than 0.01, the rate of this config."""
    for use, rate in ((True, 6e-4), (False, 0.01)):
        path = config_at(tmp_path, prefix, run, train_iters=60000, use_checkpoint_lr_scheduler=use)
        config = load_config([path])
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        annealing = AnnealingLR(optimizer, schedule_of(config), use_checkpoint=use)
        start = choose_start(config, ALONE, 60000 * 2)
        start.finish(SimpleNamespace(), annealing, ALONE, RunDescription())
        assert annealing.num_iters == 50000 and annealing.schedule.start_lr == rate
        assert start.progress.consumed_samples == 50000 * 2


@pytest.mark.parametrize("iteration", [0, 1, 999, 1000, 2500])
def test_without_accumulation_both_rules_read_the_same_batches(tmp_path, prefix, iteration):
    path = config_at(tmp_path, prefix, tmp_path, train_iters=3000)
    data = JobData(load_config([path]), ALONE)
    for name, evaluations in (("valid", iteration // 1000), ("test", 0)):
        ours = data.held_out(name, evaluations_before=evaluations)
        published = data.held_out_at(name, iteration=iteration)
        assert ours.consumed_samples == published.consumed_samples
        assert np.array_equal(next(ours), next(published))
