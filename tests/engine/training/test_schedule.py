"""Test learning rates against numbers of the published schedule and against its properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.engine.training.schedule import STYLES, AnnealingLR, Schedule

# lr at a step, lr 6e-4, 50,000 iterations, warm-up 1 %, cosine: computed by the published code
PUBLISHED = {
    0: 0.0,
    1: 1.2e-06,
    250: 0.0003,
    499: 0.0005988,
    500: 0.0006,
    501: 0.0005999999994078237,
    1000: 0.0005998519681097194,
    10000: 0.0005481241722823685,
    25000: 0.00030942322772343844,
    49499: 5.931656359346893e-07,
    49500: 5.919814715185322e-07,
    49501: 5.919814715185322e-07,
    60000: 5.919814715185322e-07,
}


def test_published_cosine():
    schedule = Schedule(6e-4, 50_000, 500.0, "cosine")
    for step, lr in PUBLISHED.items():
        assert schedule(step) == pytest.approx(lr, rel=1e-12), step


def test_other_styles_at_hand_computed_points():
    assert Schedule(1.0, 100, 10, "linear")(60) == pytest.approx(0.5)
    assert Schedule(1.0, 100, 10, "exponential")(60) == pytest.approx(math.exp(-0.693 / 2))
    assert Schedule(1.0, 100, 10, "constant")(99) == 1.0
    assert Schedule(1.0, 100, 10, "linear", min_lr=0.7)(60) == 0.7
    assert Schedule(1.0, 100, 10, "linear", min_lr=0.7)(1) == pytest.approx(0.1)


@given(
    style=st.sampled_from(STYLES),
    end=st.integers(2, 400),
    warmup=st.floats(0, 0.5),
    floor=st.floats(0, 0.5),
)
def test_warm_up_rises_then_the_rate_never_does(style, end, warmup, floor):
    schedule = Schedule(1.0, end, warmup * end, style, floor)
    rates = [schedule(step) for step in range(end + 20)]
    peak = math.ceil(warmup * end)
    assert all(a <= b + 1e-15 for a, b in zip(rates[:peak], rates[1:peak], strict=False))
    assert all(a >= b - 1e-15 for a, b in zip(rates[peak:], rates[peak + 1 :], strict=False))
    assert all(0 <= rate <= 1 for rate in rates)
    assert all(rate >= floor for rate in rates[peak + 1 :])


def test_an_unknown_style_is_named():
    with pytest.raises(ValueError, match="quadratic"):
        Schedule(1.0, 10, decay_style="quadratic")


def make(schedule, **kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=9.0)
    return AnnealingLR(optimizer, schedule, **kwargs), optimizer


def test_the_rate_is_in_the_optimizer_before_the_first_step_and_after_each():
    schedule = Schedule(1.0, 10, 2, "linear")
    annealing, optimizer = make(schedule)
    for step in range(5):
        assert optimizer.param_groups[0]["lr"] == annealing.get_last_lr()[0] == schedule(step)
        annealing.step()


def test_a_resumed_schedule_goes_on_with_this_runs_curve_or_the_checkpoints():
    annealing, _ = make(Schedule(1.0, 10, 2, "linear"))
    for _ in range(4):
        annealing.step()
    state = annealing.state_dict()
    configured, optimizer = make(Schedule(0.5, 20, 2, "cosine"))
    configured.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == Schedule(0.5, 20, 2, "cosine")(4)
    kept, optimizer = make(Schedule(0.5, 20, 2, "cosine"), use_checkpoint=True)
    kept.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == Schedule(1.0, 10, 2, "linear")(4)


def test_wsd_is_stable_and_then_decays_to_its_end():
    rates = {"cosine": 0.55, "linear": 0.55, "exponential": 0.1 + 0.9 * (2**0.5 - 1)}
    for style, middle in (rates | {"minus_sqrt": 0.1 + 0.9 * (1 - 0.5**0.5)}).items():
        schedule = Schedule(1.0, 100, 10, "wsd", 0.1, wsd_decay_ratio=0.2, wsd_decay_style=style)
        assert schedule(5) == 0.5
        assert {schedule(step) for step in range(10, 81)} == {1.0}
        assert 0.1 < schedule(99) < schedule(90) < schedule(81) < 1
        assert schedule(90) == pytest.approx(middle)
        assert schedule(100) == schedule(130) == pytest.approx(0.1)
    gpt_neox = Schedule(1.0, 100, 0, "wsd")  # PR 1375: the last tenth, a cosine
    assert gpt_neox(90) == 1 and gpt_neox(95) == pytest.approx(0.5) and gpt_neox(100) == 0
    assert Schedule(1.0, 100, 90, "wsd")(45) == 0.5  # the warm-up may be longer than half
