"""The losses that engines give to the evaluation, with engines that compute nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.engine.training.batches import Counting
from megatron.engine.training.pipeline_engine import PipelineLosses, loss_of_batches
from megatron.parallel.groups import Groups, TensorGroup, build_groups

CPU = build_groups(torch.device("cpu"))
ARRAYS = [np.array([[1, 2, 3, 4]]), np.array([[5, ~6, 9, 7]])]


class Others(Groups):
    """Two data-parallel ranks, of which the other has losses of 10 in all, of 5 weights in all."""

    def sum_over_data(self, tensor):
        assert tensor.dtype == torch.float64
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        return tensor + (10.0 if self.__dict__["calls"] == 1 else 5.0)


def loss_is_the_target(inputs, targets):
    return targets.float().clamp(min=0)


def engine():
    """Return a plain engine, which records whether it trains."""
    modes = []

    def call(inputs, targets):
        assert modes == ["eval"] and not torch.is_grad_enabled()
        return loss_is_the_target(inputs, targets)

    class Plain:
        eval = staticmethod(lambda: modes.append("eval"))
        train = staticmethod(lambda: modes.append("train"))
        __call__ = staticmethod(call)

    return Plain(), modes


@pytest.mark.parametrize(
    ("counting", "alone", "with_others"),
    [
        (Counting(), (3 + 8) / 2, (3 + 8 + 10) / (2 + 5)),  # means of 2, 3, 4 and of 9, 7
        (Counting(per_token=True), (9 + 16) / 5, (9 + 16 + 10) / (5 + 5)),
        (Counting(9, per_token=True), (9 + 9) / 4, (9 + 9 + 10) / (4 + 5)),  # 7 follows 9
    ],
)
def test_the_mean_over_micro_batches_or_over_targets(counting, alone, with_others):
    plain, modes = engine()
    assert loss_of_batches(plain, iter(ARRAYS), 2, CPU, counting) == pytest.approx(alone)
    assert modes == ["eval", "train"]
    both = Others(**vars(replace(CPU, data_size=2)))
    found = loss_of_batches(engine()[0], iter(ARRAYS), 2, both, counting)
    assert found == pytest.approx(with_others)


def test_micro_batches_without_targets_have_the_loss_0():
    nothing = iter([np.full((1, 4), ~1)])
    assert loss_of_batches(engine()[0], nothing, 1, CPU, Counting(per_token=True)) == 0.0


class Stage:
    """A pipeline stage that records its inputs. Its loss is the target."""

    def __init__(self, is_last: bool):
        self.is_last_stage, self.total_loss, self.calls = (lambda: is_last), 99.0, []

    def reset_activation_shape(self):
        self.calls.append("reset")

    def eval_batch(self, batches, reduce_output, bcast_loss, num_micro_batches):
        assert (reduce_output, bcast_loss, num_micro_batches) == (None, False, 1)
        assert self.total_loss is None and not torch.is_grad_enabled()
        [(inputs, targets)] = list(batches)
        self.calls.append((inputs.tolist(), targets.tolist()))
        return [loss_is_the_target(inputs, targets).double()]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_every_stage_gets_the_losses_of_the_last(monkeypatch, is_last, splits):
    """Two ranks that split a sequence of 3 tokens need one token of padding."""
    sent = []

    def broadcast(losses, src, group):
        sent.append((src, group, losses.is_contiguous()))
        if not is_last:
            losses.copy_(torch.tensor([[2.0, 3.0, 4.0]]))

    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: 100 + rank)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    tensor = TensorGroup(size=2, sequence_parallel=splits)
    pipe = SimpleNamespace()
    stage = Stage(is_last)
    losses = PipelineLosses(stage, replace(CPU, pipe=pipe, pipe_size=4, model=tensor))
    inputs, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    found = losses(inputs, targets)
    assert found.tolist() == [[2.0, 3.0, 4.0]] and found.dtype == torch.float32
    assert sent == [(103, pipe, True)]
    padding = [0] if splits else []
    given = ([[1, 2, 3, *padding]], [[2, 3, 4, *padding]])
    assert stage.calls == ["reset", given, "reset"]
    losses(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])) if is_last else None
    assert stage.calls[3:] == (["reset", ([[1, 2]], [[2, 3]]), "reset"] if is_last else [])
