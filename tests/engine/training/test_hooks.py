"""Test the order in which the training loop calls its hooks, and that each restores its state."""

from types import SimpleNamespace

import pytest
import torch

from megatron.config import load_config
from megatron.config.sections.training import TrainingConfig
from megatron.engine.run_log.log import RunLog
from megatron.engine.training import loop
from megatron.engine.training.bad_loss import LossGuard
from megatron.engine.training.hooks import Hook, state_of
from megatron.parallel.groups import build_groups
from tests.helpers.paths import ROOT


class Recorder(Hook):
    def __init__(self, name: str, calls: list[str], fails_after: int = 0):
        self.name, self.calls, self.fails_after = name, calls, fails_after

    def begin(self, step):
        self.calls.append(f"{self.name} begins at {step}")

    def before_step(self, number):
        self.calls.append(f"{self.name} before {number}")

    def changed_loss(self, loss, mean):
        return loss * 2 + mean

    def after_step(self, step):
        self.calls.append(f"{self.name} after {step.number}")
        if step.number == self.fails_after:
            raise RuntimeError(self.name)

    def state(self):
        return {self.name: len(self.calls)}

    def load_state(self, state):
        self.calls.append(f"{self.name} loads {state.get(self.name)}")

    def __exit__(self, kind, error, trace):
        self.calls.append(f"{self.name} ends{' after an error' if kind else ''}")


def run_loop(monkeypatch, hooks, state, **keys):
    """Run the loop with steps that change nothing, from step 1 on."""
    monkeypatch.setattr(loop, "train_step", lambda *_: (torch.zeros(()), 1.0))
    config = load_config(
        [ROOT / "configs" / "quickstart.yml"], [f"{key}={value}" for key, value in keys.items()]
    )
    engine = SimpleNamespace(optimizer=None, train=lambda: None, get_lr=lambda: [0.1])
    theta = SimpleNamespace(project=lambda: None)
    log, groups = RunLog(None, is_main=False), build_groups(torch.device("cpu"))
    training = loop.TrainingLoop(config, engine, groups, theta, log, hooks, state)
    training.run(SimpleNamespace(consumed_samples=0), 1)


def test_the_first_hook_is_the_nearest_to_the_step(monkeypatch):
    calls: list[str] = []
    hooks = [Recorder("a", calls), Recorder("b", calls)]
    run_loop(monkeypatch, hooks, {"b": 7}, train_iters=3)
    steps = [f"{who} {n}" for n in (2, 3) for who in ("b before", "a before", "a after", "b after")]
    assert calls == [
        "a loads None", "b loads 7", "a begins at 1", "b begins at 1", *steps, "b ends", "a ends"
    ]  # fmt: skip
    assert state_of(hooks) == {"a": len(calls), "b": len(calls)}


def test_an_error_of_a_hook_ends_the_loop_and_closes_all_hooks(monkeypatch):
    calls: list[str] = []
    hooks = [Recorder("a", calls, fails_after=2), Recorder("b", calls)]
    with pytest.raises(RuntimeError, match="a"):
        run_loop(monkeypatch, hooks, {}, train_iters=3)
    assert calls[-4:] == [
        "a before 2",
        "a after 2",
        "b ends after an error",
        "a ends after an error",
    ]


def test_a_step_knows_its_samples_and_whether_it_saves(monkeypatch):
    seen = []

    class Spy(Hook):
        def after_step(self, step):
            step.consumed_samples = 40
            names = step.samples(), step.samples(2)
            seen.append((step.number, step.saves, step.last, *names))

    keys = {"train_iters": 5, "save_interval": 2, "extra_save_iters": "[3]"}
    batch = {"train_batch_size": "null", "train_micro_batch_size_per_gpu": 16}
    run_loop(monkeypatch, [Spy()], {}, **keys, **batch)
    names = "samples 24 to 39 of the split train", "samples 8 to 39 of the split train"
    saves = {2: True, 3: True, 4: True, 5: True}
    assert seen == [(n, saves[n], n == 5, *names) for n in (2, 3, 4, 5)]


def test_the_guards_average_is_restored_from_its_own_state():
    training = TrainingConfig(train_iters=9, on_bad_loss="skip", loss_spike_threshold=1.0)
    engine = SimpleNamespace(optimizer=SimpleNamespace(), fp16_enabled=lambda: False)
    groups = build_groups(torch.device("cpu"))
    first, resumed = (
        LossGuard(engine, groups, training, RunLog(None, is_main=False)) for _ in "12"
    )
    first.load_state({})
    assert first.state() == {}
    for loss in (2.0, 3.0):
        assert first.judge(torch.tensor(loss), None) == ""
    assert first.state() == {"average_loss": pytest.approx(0.9 * 2.0 + 0.1 * 3.0)}
    resumed.load_state(first.state() | {"owes_validation": True, "steps": 2})
    assert resumed.state() == first.state()
    assert "rose from 2.1" in resumed.judge(torch.tensor(3.2), None)
