"""The mean loss of an interval that a checkpoint has cut."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from megatron.engine.training.meter import Meter
from megatron.parallel.groups import Groups, build_groups

ALONE = build_groups(torch.device("cpu"))
LOSSES = [torch.tensor(x) for x in (2.1, 0.7, 1.3, 5.9, 3.3)]


def test_a_resumed_meter_has_the_mean_of_one_that_went_on():
    whole, first = Meter(ALONE), Meter(ALONE)
    for loss in LOSSES:
        whole.add(loss)
    for loss in LOSSES[:3]:
        first.add(loss)
    resumed = Meter(ALONE, first.state())
    for loss in LOSSES[3:]:
        resumed.add(loss)
    assert resumed.mean() == whole.mean() and resumed.steps == 5
    resumed.reset()
    assert resumed.state() == {}


def test_with_another_number_of_ranks_each_takes_the_mean_of_all():
    """Two ranks had the sums 4 and 8 after two steps, so the mean loss was 3."""
    state = {"steps": 2, "losses": [4.0, 8.0]}
    assert Meter(ALONE, state).mean() == 3.0
    ranks = [replace(ALONE, data_rank=rank, data_size=2) for rank in (0, 1)]
    own = [Meter(groups, state).state()["losses"] for groups in ranks]
    assert own == [[4.0], [8.0]]


@dataclass(frozen=True)
class Three(Groups):
    """The second of three data-parallel ranks; the others have sums of 4 and 11."""

    def sum_over_data(self, tensor):
        return tensor + 15.0

    def gather_from_job(self, value):
        return [(2, 11.0), value, (0, 4.0)]


THREE = Three(**vars(replace(ALONE, data_rank=1, data_size=3)))


def test_the_mean_is_over_ranks_and_steps():
    """(3 + 6 + 4 + 11) / (3 ranks x 2 steps) = 4."""
    meter = Meter(THREE)
    assert math.isnan(meter.mean()) and meter.state() == {}
    for loss in (3.0, 6.0):
        meter.add(torch.tensor(loss))
    assert meter.mean() == 4.0 and meter.steps == 2
    state = meter.state()
    assert state == {"steps": 2, "losses": [4.0, 9.0, 11.0]}
    assert Meter(THREE, state).state() == state and Meter(THREE, state).mean() == 4.0
    two = Meter(replace(ALONE, data_size=2), state)
    assert two.state()["losses"] == [8.0]  # the mean of the three, on each of two ranks


def test_seconds_are_per_step_and_a_reset_forgets_them():
    meter = Meter(ALONE)
    assert meter.seconds_per_step == 0.0
    for seconds in (1.0, 4.0, 4.0, 3.0):
        meter.time(seconds)
    assert meter.seconds_per_step == 3.0
    meter.reset()
    meter.time(5.0)
    assert meter.seconds_per_step == pytest.approx(5.0)
