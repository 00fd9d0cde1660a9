"""Test that theta, pushed beyond a bound by a step, is clamped in both copy and fp32 master."""

import pytest
import torch
from torch import nn

from megatron.attention import choose
from megatron.config import load_config
from megatron.engine.training.deepspeed_engine import build_engine, engine_config
from megatron.engine.training.optimizer import build_optimizer, parameter_groups
from megatron.engine.training.schedule import AnnealingLR, Schedule
from megatron.engine.training.trained_theta import TrainedTheta
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.numerics import WIDE, PublishedNumerics
from megatron.positional import bounds, load
from tests.helpers.jobs import PRECISIONS, STAGES
from tests.helpers.launch import run_ranks
from tests.helpers.paths import ROOT

PUSHES = {"low": 100.0, "high": -100.0}


class Pushed(nn.Module):
    """A model whose loss has an additional term that moves theta."""

    def __init__(self, gpt: GPT, push: float):
        super().__init__()
        self.gpt, self.push = gpt, push

    def forward(self, inputs, targets):
        _, theta = self.gpt.embedding(inputs)
        return self.gpt(inputs, targets).mean() + self.push * theta.sum()


def push(groups, stage, precision, bound, numerics=WIDE):
    """Return [(copy, master before projection, master after it)] for three steps."""
    import deepspeed

    pos = load("kerple_power", numerics=numerics)
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float32)
    block = BlockShape(hidden_size=32, num_heads=4)
    gpt = GPT(
        Plan(GPTShape(num_layers=2, vocab_size=64, block=block, max_positions=16), pos, attend, 1)
    )
    low, high = bounds(pos.parameters)
    with torch.no_grad():
        start = low if bound == "low" else high.clamp(max=2.0)
        gpt.theta.copy_(start.expand_as(gpt.theta))
    model = Pushed(gpt, PUSHES[bound])
    keys = [
        "train_micro_batch_size_per_gpu=2", "train_batch_size=null", "weight_decay=0.01",
        f"precision={precision}", "gradient_clipping=1.0", f"zero_optimization={{stage: {stage}}}",
        "optimizer={type: Adam, params: {lr: 0.1, betas: [0.9, 0.999], eps: 1.0e-8}}",
    ]  # fmt: skip
    made = load_config([ROOT / "configs" / "quickstart.yml"], keys, world_size=groups.world_size)
    optimizer = build_optimizer("adam", parameter_groups(model, made.optimizer), made.optimizer)
    config = engine_config(made, groups.world_size)
    schedule = AnnealingLR(optimizer, Schedule(0.1, 100))
    engine = build_engine(model, optimizer, schedule, config, groups, numerics=numerics)
    trained = TrainedTheta(engine, gpt.theta_parts, pos, groups)
    seen = []
    for step in range(3):
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(step))
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        before = trained.master()
        trained.project()
        after = trained.master()
        with deepspeed.zero.GatheredParameters([gpt.theta], enabled=stage == 3):
            copy = gpt.theta.detach().clone()
        seen.append((copy, before, after))
    return seen


def all_pushes(groups):
    published = PublishedNumerics(torch.bfloat16)
    alone = {
        (stage, "bf16", "alone"): push(groups, stage, "bf16", "low", published) for stage in STAGES
    }
    return alone | {
        (stage, precision, bound): push(groups, stage, precision, bound)
        for stage in STAGES
        for precision in PRECISIONS
        for bound in PUSHES
    }


@pytest.fixture(scope="module", params=[1, 2])
def outcome(request):
    ranks = run_ranks(request.param, all_pushes)
    for other in ranks[1:]:  # every rank holds the same theta
        for key, steps in ranks[0].items():
            for mine, theirs in zip(steps, other[key], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), key
    return ranks[0]


@pytest.mark.parametrize("bound", PUSHES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_copy_and_master_lie_within_the_bounds(outcome, stage, precision, bound):
    low, high = bounds(load("kerple_power").parameters)
    for step, (copy, before, after) in enumerate(outcome[stage, precision, bound]):
        outside = (before < low) | (before > high)
        assert outside.any(), "the push did not leave the bounds: the test tests nothing"
        assert torch.equal(after, before.clamp(low, high))
        assert torch.equal(copy, after.to(copy.dtype))
        assert ((copy.float() >= low) & (copy.float() <= high)).all()
        if step == 0:  # Adam's first step is lr, whatever the gradient: no phantom step before it
            moved = (before - (low if bound == "low" else high.clamp(max=2.0))).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, 0.1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_with_published_numerics_the_copy_alone_is_clamped(outcome, stage):
    """The fp32 master is not clamped, as in the released code, and only the copy is."""
    low, high = bounds(load("kerple_power").parameters)
    steps = outcome[stage, "bf16", "alone"]
    for copy, before, after in steps:
        assert torch.equal(after, before), "the master was touched"
        assert torch.equal(copy, before.clamp(low, high).to(copy.dtype))
    masters = torch.stack([after for _, _, after in steps])
    assert (masters[2] < masters[0]).all() and (masters[2] < low).all()
    first = (masters[0] - low).abs()
    # Without ZeRO the empty step that allocates the optimizer's state counts in Adam's correction.
    rate = 0.1 * (0.1 / (1 - 0.9**2)) / (0.001 / (1 - 0.999**2)) ** 0.5 if stage == 0 else 0.1
    torch.testing.assert_close(first, torch.full_like(first, rate), rtol=1e-3, atol=0)
