"""The mean loss of an interval that a checkpoint has cut."""

from dataclasses import replace

import torch

from megatron.engine.training.meter import Meter
from megatron.parallel.groups import build_groups

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
