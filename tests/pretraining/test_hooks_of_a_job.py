"""Test the hooks that validate and save: what a job owes when it leaves, and what it stores."""

from types import SimpleNamespace

import pytest
import torch

from megatron import preemption
from megatron.engine.checkpoint.record import TrainingProgress
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.hooks import Hook, Step
from megatron.pretraining.saving import Saving
from megatron.pretraining.validation import Validation, is_owed
from tests.helpers.jobs import metric_rows


def step(number, **values):
    given = dict.fromkeys(("last", "leaves", "logs", "validates", "saves"), False) | values
    return Step(number, 0.1, torch.zeros(()), None, consumed_samples=0, batch_size=4, **given)


def leaves(number):
    raise preemption.Leave


def test_a_validation_that_a_signal_interrupts_is_owed_and_made_up(tmp_path):
    with RunLog(tmp_path, is_main=True) as log:
        validation, now = Validation(leaves, log), step(4, validates=True)
        validation.load_state({})
        validation.after_step(now)
    assert now.leaves and validation.state() == {"owes_validation": True}
    with RunLog(tmp_path, is_main=True, append=True, last_step=4) as log:
        log.metrics(4, {"validation/loss": 9.0})  # of a run that resumed before and was killed
        log.metrics(4, {"train/loss": 1.0})
        resumed = Validation(lambda number: {"validation/loss": number / 8}, log)
        resumed.load_state(validation.state())
        resumed.begin(4)
    assert not is_owed(resumed.state())
    assert metric_rows(tmp_path) == [
        {"step": 4, "train/loss": 1.0},
        {"step": 4, "validation/loss": 0.5, "validation/perplexity": pytest.approx(1.6487, 1e-4)},
    ]


def test_a_job_that_leaves_does_not_begin_its_validation():
    validation, log = Validation(leaves, RunLog(None, is_main=False)), []
    validation.load_state({})
    validation.after_step(step(3))
    log.append(is_owed(validation.state()))
    validation.after_step(step(4, validates=True, leaves=True))
    log.append(is_owed(validation.state()))
    assert log == [False, True]


def test_the_progress_is_that_of_the_last_step_that_saves():
    class Counter(Hook):
        def state(self):
            return {"steps": 3}

    saved = []
    saver = SimpleNamespace(save=saved.append, check=lambda: None, wait=lambda: saved.append("end"))
    loader = SimpleNamespace(consumed_samples=12)
    with Saving(saver, TrainingProgress(0, 0, 99), loader, [Counter()]) as saving:
        for number, ends in ((1, {}), (2, {"saves": True}), (3, {"leaves": True}), (4, {})):
            saving.before_step(number)
            saving.after_step(step(number, **ends))
    expected = [TrainingProgress(n, 12, 99, {"steps": 3}) for n in (2, 3)]
    assert saved == [*expected, "end"] and saving.progress == expected[-1]
