"""Test how micro-batches come to the device: their order, and the position in the data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.samples.loader import TrainLoader
from megatron.engine.training.batches import Counting, cut, next_batches, on_device


class Numbers:
    """Samples 0, 1, 2, ... of four tokens each: all tokens of a sample are its number."""

    name = where = "numbers"
    num_samples = 12

    def __len__(self):
        return self.num_samples

    def batch(self, indices):
        return np.repeat(indices[:, None], 4, axis=1)


@pytest.fixture
def copies(monkeypatch):
    """Replace the copies to a GPU by records of them; return the records."""
    found, pinned = [], []

    def pin(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor, device, non_blocking):
        assert non_blocking and any(tensor is each for each in pinned)
        found.append((device.type, tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return found


def test_a_gpu_gets_page_locked_memory_and_no_batch_is_read_before_its_turn(copies):
    samples: Any = Numbers()
    loader = TrainLoader(samples, global_batch=4, micro_batch=2)
    groups: Any = SimpleNamespace(device=torch.device("cuda"))
    for step in (1, 2):
        for micro, (inputs, targets, _) in enumerate(next_batches(loader, 2, groups), 1):
            first = 4 * (step - 1) + 2 * (micro - 1)
            assert loader.consumed_samples == first + 2  # what a checkpoint would hold
            assert inputs.tolist() == targets.tolist() == [[first] * 3, [first + 1] * 3]
    assert [device for device, _ in copies] == ["cuda"] * 4


def test_a_cpu_copies_nothing():
    array = np.zeros((2, 3), dtype=np.int64)
    tensor = on_device(array, torch.device("cpu"))
    array[0, 0] = 7
    assert tensor[0, 0] == 7


def test_the_divisor_is_the_mean_number_of_targets_of_all_micro_batches():
    """Here 3 + 3 targets count, and 7 on the other two of 3 ranks, in 2 micro-batches each.

    If targets after the token 9 do not count, they are 3 + 2.
    """
    groups: Any = SimpleNamespace(
        device=torch.device("cpu"), data_size=3, sum_over_data=lambda total: total + 7
    )
    arrays = [np.array([[1, 2, 3, 4]]), np.array([[~1, 9, 6, 5]])]
    assert Counting(per_token=True).divisor(arrays, groups) == (3 + 3 + 7) / 6
    found = list(next_batches(iter(arrays), 2, groups, Counting(9, per_token=True)))
    assert [(x.tolist(), y.tolist()) for x, y, _ in found] == [
        ([[1, 2, 3]], [[2, 3, 4]]),
        ([[1, 9, 6]], [[9, -1, 5]]),
    ]
    assert [float(divisor) for *_, divisor in found if divisor is not None] == [2.0, 2.0]


def test_sequences_are_cut_at_equal_lengths_and_keep_every_target():
    tokens = np.arange(26).reshape(2, 13)
    found, whole, single = (next(cut(iter([tokens]), length)) for length in (4, 12, 1))
    assert found.tolist() == [
        [0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12],
        [13, 14, 15, 16, 17], [17, 18, 19, 20, 21], [21, 22, 23, 24, 25],
    ]  # fmt: skip
    assert found.flags.writeable and whole is tokens
    assert single[:, 1].tolist() == tokens[:, 1:].ravel().tolist()
