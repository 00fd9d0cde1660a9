"""The means, warnings, errors and columns of the log, from losses that are known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.config import load_config
from megatron.engine.errors import BadLossError
from megatron.engine.training import step_log
from megatron.engine.training.hooks import Step
from megatron.engine.training.speed import Speed
from megatron.engine.training.step_log import StepLog
from megatron.parallel.groups import build_groups
from tests.helpers.jobs import write_config

CPU = build_groups(torch.device("cpu"))
FLAGS = ("last", "leaves", "logs", "validates", "saves")
RISES = "see the keys loss_spike_threshold and on_bad_loss"


@pytest.fixture
def log_of(tmp_path):
    """Return a function from losses to the lines, the rows and the hook after these steps."""

    def run(losses, every=2, skipped=(), saves=(), theta=dict, optimizer=None, norm=None, **keys):
        keys = {"train_batch_size": 8, "log_interval": every, "train_iters": 9} | keys
        config = load_config([write_config(tmp_path / "c.yml", "text", **keys)])
        lines, rows = [], {}
        log = SimpleNamespace(
            line=lines.append,
            metrics=lambda number, values, text, *shorter: rows.update(
                {number: values | {"text": text, "shorter": list(shorter)}}
            ),
            progress=lambda number, steps, text: rows.setdefault("live", []).append(text),
        )
        engine = SimpleNamespace(module=nn.Linear(1, 1), optimizer=optimizer)
        speed = Speed({16: 0.0}, 1, None)
        hook = StepLog(config, engine, CPU, SimpleNamespace(columns=theta), speed, log)
        hook.load_state({})
        hook.engine = engine
        for number, loss in enumerate(losses, 1):
            flags = dict.fromkeys(FLAGS, False) | {"logs": number % every == 0}
            step = Step(
                number, 0.25, torch.tensor(loss), norm, 8 * number, 8,
                **flags | {"saves": number in saves}, good=number not in skipped,
            )  # fmt: skip
            hook.before_step(number)
            hook.after_step(step)
        hook.live = rows.pop("live")
        return lines, rows, hook

    return run


def test_a_row_has_the_mean_of_the_good_steps_since_the_last_one(log_of):
    _, rows, hook = log_of([2.0, 4.0, 9.0, 1.0, 5.0], skipped=[3], norm=torch.tensor(0.5))
    assert {number: row["train/loss"] for number, row in rows.items()} == {2: 3.0, 4: 1.0}
    assert hook.state() == {"steps": 1, "losses": [5.0]}
    row = rows[4]
    assert (row["train/lr"], row["train/samples"], row["train/tokens"]) == (0.25, 32, 512)
    assert row["train/grad_norm"] == 0.5 and "train/loss_scale" not in row
    assert row["text"].startswith("step 4/9 | loss 1.0000 | lr 2.50e-01 | grad norm 0.500 | ")
    assert "theta" not in row["text"]


def test_the_live_line_has_the_numbers_of_the_last_line_and_a_time_that_falls(log_of, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(step_log.time, "monotonic", lambda: float(next(clock)))
    _, rows, hook = log_of([2.0, 4.0, 1.0])  # 10 s a step of 8 x 16 tokens
    assert hook.live == [
        "no loss yet",
        "loss 3.0000 | 13 tokens/s | ETA 0:01:10",
        "loss 3.0000 | 13 tokens/s | ETA 0:01:00",
    ]
    assert rows[2]["text"].endswith(" | 13 tokens/s | ETA 0:01:10")


def test_theta_is_shown_by_its_extremes(log_of):
    columns = {"a": torch.tensor([3.0, 1.0, 2.0]), "p": torch.tensor([0.5, 0.25])}
    _, rows, _ = log_of([2.0, 2.0], theta=lambda: columns)
    row = rows[2]
    assert row["text"].endswith(" | theta a 1..3, p 0.25..0.5")
    line = row["text"].partition(" | ETA")[0]
    assert row["shorter"] == [f"{line} | theta 0.25..3", line]
    assert [row[f"theta/{name}"] for name in ("a_min", "a_max", "p_min", "p_max")] == [
        1.0, 3.0, 0.25, 0.5
    ]  # fmt: skip
    assert row["theta/a"] == [3.0, 1.0, 2.0] and "train/grad_norm" not in row


def test_a_mean_that_rises_by_more_than_3_nats_is_told(log_of):
    """Means 1, 4 and 7.5: the first is the first, the second is 3 above, the third 3.5."""
    lines, _, _ = log_of([1.0, 1.0, 4.0, 4.0, 7.0, 8.0])
    assert lines == [f"  the loss rose from 4.0000 to 7.5000: {RISES}"]
    assert log_of([9.0, 9.0, 1.0, 1.0])[0] == []
    # Two steps without an update have no mean, and the mean before them is kept.
    lines, rows, _ = log_of([1.0, 1.0, 9.0, 9.0, 5.0, 5.0], skipped=[3, 4])
    assert math.isnan(rows[4]["train/loss"])
    assert rows[4]["text"].startswith("step 4/9 | updates skipped | lr 2.50e-01")
    assert lines == [f"  the loss rose from 1.0000 to 5.0000: {RISES}"]
    # A mean at a checkpoint between two lines is not one of a line.
    assert log_of([1.0, 1.0, 9.0, 1.0], saves=[3])[0] == [
        f"  the loss rose from 1.0000 to 5.0000: {RISES}"
    ]


def test_a_loss_that_is_not_finite_ends_the_run_at_a_line_or_checkpoint(log_of):
    for saves, number, samples in (([], 4, "16 to 31"), ([3], 3, "16 to 23")):
        with pytest.raises(BadLossError) as error:
            log_of([1.0, 1.0, math.nan, 1.0], saves=saves)
        assert str(error.value).startswith(
            f"the loss is nan at step {number}, samples {samples} of the split train; "
        )
    assert log_of([math.nan, 1.0, 1.0], every=9)[1] == {}


def test_fp16_has_its_scale_and_no_error(log_of, monkeypatch):
    keys = {"fp16": {"enabled": True}}
    _, rows, _ = log_of([math.inf, 1.0], optimizer=SimpleNamespace(loss_scale=64.0), **keys)
    assert rows[2]["train/loss"] == math.inf and rows[2]["train/loss_scale"] == 64.0
    assert log_of([1.0, 1.0], **keys)[1][2]["train/loss_scale"] == 1.0


def test_weights_are_checked_before_a_checkpoint_only(log_of, monkeypatch):
    monkeypatch.setattr(step_log, "all_finite", lambda module, groups: False)
    assert list(log_of([1.0, 1.0])[1]) == [2]
    with pytest.raises(BadLossError, match="weights are no longer finite after step 1; lower"):
        log_of([1.0, 1.0], saves=[1])
