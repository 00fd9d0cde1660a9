"""One step and the flags of each step, counted by hand with engines that compute nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megatron import preemption
from megatron.config import load_config
from megatron.engine.training import loop
from megatron.engine.training.batches import Counting
from megatron.engine.training.hooks import Hook
from megatron.parallel.groups import build_groups
from tests.helpers.paths import ROOT

CPU = build_groups(torch.device("cpu"))


class Engine:
    """An engine whose losses are given, and whose gradient is (3, 4) times the loss scale."""

    def __init__(self, losses, *, zero=False, bf16=False, scale=None):
        self.losses, self.done, self.calls = losses, 0, []
        self.module = nn.Linear(2, 1, bias=False)
        self.optimizer = SimpleNamespace(**({} if scale is None else {"loss_scale": scale}))
        self.scale = scale or 1.0
        self.zero_optimization, self.bfloat16_enabled = (lambda: zero), (lambda: bf16)
        self.get_global_grad_norm = lambda: 77.0

    def __call__(self, inputs, targets):
        self.calls.append(("forward", inputs.tolist(), targets.tolist()))
        return torch.tensor([self.losses[self.done]])

    def is_gradient_accumulation_boundary(self):
        return self.done == len(self.losses) - 1

    def backward(self, loss):
        self.calls.append(("backward", float(loss)))
        self.module.weight.grad = torch.tensor([[3.0, 4.0]]) * self.scale

    def step(self):
        self.calls.append("step")
        self.done += 1


class Doubled(Hook):
    def changed_loss(self, loss, mean):
        return 100 * loss + mean


ARRAYS = [np.array([[1, 2, 3]]), np.array([[4, ~5, 6]])]


def test_a_step_accumulates_and_only_the_last_loss_is_changed():
    """Micro-batches of losses (1, 3) and (8, 0), where the second has one target."""
    engine = Engine([[1.0, 3.0], [8.0, 0.0]], zero=True)
    hooks = [Doubled(), Doubled()]
    loss, norm = loop.train_step(engine, iter(ARRAYS), 2, CPU, hooks)
    assert float(loss) == (2 + 8) / 2 and norm == 77.0
    assert engine.calls == [
        ("forward", [[1, 2]], [[2, 3]]), ("backward", 2.0), "step",
        ("forward", [[4, 5]], [[-1, 6]]), ("backward", 100 * (100 * 8 + 5) + 5), "step",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "norm"),
    [
        ({}, 5.0),  # fp32 without ZeRO
        ({"scale": 8.0}, 5.0),  # fp16: DeepSpeed's would be 8 times as large
        ({"bf16": True}, 77.0),
        ({"zero": True, "scale": 8.0}, 77.0),
    ],
)
def test_the_norm_is_deepspeeds_where_it_has_one(keys, norm):
    engine = Engine([[1.0, 3.0], [8.0, 0.0]], **keys)
    assert float(loop.train_step(engine, iter(ARRAYS), 2, CPU)[1]) == norm


class Stage(PipelineEngine):
    """A pipeline engine with fixed results. It keeps the pairs that `train_batch` gets."""

    def __init__(self):
        nn.Module.__init__(self)
        self.dp_group_loss = torch.tensor(3.5)

    def train_batch(self, pairs):
        self.given = list(pairs)

    def get_global_grad_norm(self):
        return 77.0


@pytest.mark.parametrize("per_token", [False, True])
def test_a_pipeline_gets_the_divisor_beside_the_targets(per_token):
    """The two micro-batches have 2 and 1 targets, so the divisor is 1.5."""
    stage = Stage()
    found = loop.train_step(stage, iter(ARRAYS), 2, CPU, [Doubled()], Counting(None, per_token))
    assert found == (3.5, 77.0)
    for (inputs, rest), array in zip(stage.given, ARRAYS, strict=True):
        targets, divisor = rest if per_token else (rest, 1.5)
        assert inputs.shape == targets.shape == (1, 2) and divisor == 1.5
        assert targets[0, 1] == array[0, 2]


@pytest.fixture
def flags(monkeypatch):
    """Return a function from config keys to the flags of each step that the loop takes."""

    def run(leaves_at=0, **keys):
        seen, said, numbers = [], [], iter(range(1, 99))

        class Spy(Hook):
            def after_step(self, step):
                names = ("last", "leaves", "logs", "validates", "saves")
                found = [name for name in names if getattr(step, name)]
                seen.append((step.number, *found))

        monkeypatch.setattr(loop, "train_step", lambda *_: (torch.zeros(()), 1.0))
        monkeypatch.setattr(preemption.Preemption, "due", lambda _: next(numbers) == leaves_at)
        keys = {"log_interval": 9, "eval_interval": 9, "save_interval": "null"} | keys
        given = [f"{key}={value}" for key, value in keys.items()]
        config = load_config([ROOT / "configs" / "quickstart.yml"], given)
        engine = SimpleNamespace(optimizer=None, train=lambda: None, get_lr=lambda: [0.1])
        theta = SimpleNamespace(project=lambda: said.append("clamped"))
        log = SimpleNamespace(line=said.append)
        training = loop.TrainingLoop(config, engine, CPU, theta, log, [Spy()], {})
        training.run(SimpleNamespace(consumed_samples=0), 0)
        return seen, said

    return run


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"log_interval": 2}, [(1,), (2, "logs"), (3,), (4, "logs")]),
        ({"eval_interval": 3}, [(1,), (2,), (3, "validates"), (4,)]),
        ({"save_interval": 2}, [(1,), (2, "saves"), (3,), (4, "saves")]),
        ({"extra_save_iters": "[1, 3]"}, [(1, "saves"), (2,), (3, "saves"), (4,)]),
    ],
)
def test_the_flags_of_each_step(flags, keys, expected):
    seen, said = flags(train_iters=5, **keys)
    assert seen[:4] == expected
    assert seen[4:] == [(5, "last", "logs", "saves")]
    assert said == ["clamped"] * 5


def test_the_loop_leaves_at_exit_interval_or_when_it_must(flags):
    seen, said = flags(train_iters=5, exit_interval=2)
    assert seen == [(1,), (2, "saves")]
    assert said[-1] == "leaving at step 2: exit_interval 2"
    seen, said = flags(train_iters=2, exit_interval=2)
    assert seen == [(1,), (2, "last", "logs", "saves")] and said == ["clamped"] * 2
    seen, said = flags(train_iters=5, leaves_at=3)
    assert seen == [(1,), (2,), (3, "leaves", "saves")] and said == ["clamped"] * 3
