"""Faults that make ranks communicate in a way that does not fit together.

Each fault changes our code, or DeepSpeed's schedule, on some ranks. It is a function that returns
the changes, as triples (object, name of an attribute, function that makes the faulty attribute).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule

from megatron.config import load_config
from megatron.engine.checkpoint import async_save
from megatron.engine.training import loop, meter, pipeline_engine, step_log
from megatron.evaluation import held_out
from megatron.parallel.groups import Groups
from megatron.pretraining import validation
from megatron.pretraining.run import train
from megatron.rehearsal.rehearse import RehearsalError, rehearse
from tests.helpers.jobs import write_config

Wrapper = Callable[..., Any]


def on(rank: int, faulty: Wrapper) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator. On `rank`, it calls `faulty(original, *args)`."""

    def wrap(original: Wrapper) -> Wrapper:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == rank:
                return faulty(original, *args, **kwargs)
            return original(*args, **kwargs)

        return chosen

    return wrap


def _in_another_order(original, self, *args):
    self.hooks = [*self.hooks[2:3], *self.hooks[:2], *self.hooks[3:]]
    return original(self, *args)


def _over_the_tensor_group(original, self, tensor):
    return original(replace(self, data=self.model.group), tensor)


def _another_shape(original, self):
    self._total = self._total[None]
    return original(self)


def _another_dtype(original, self):
    original(self)
    self._total = self._total.float()


def _largest(original, self, tensor):
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.data)
    return tensor


def _without_a_send(original, self):
    steps = [list(commands) for commands in original(self)]
    last = max(n for n, step in enumerate(steps) if _sends(step))
    steps[last] = [each for each in steps[last] if not isinstance(each, schedule.SendActivation)]
    return iter(steps)


def _sends(commands) -> bool:
    return any(isinstance(each, schedule.SendActivation) for each in commands)


def _receives_first(original, self):
    kinds = (schedule.SendGrad, schedule.RecvActivation)
    for commands in original(self):
        both = [each for each in commands if isinstance(each, kinds)]
        rest = [each for each in commands if not isinstance(each, kinds)]
        yield [*both[::-1], *rest]


def _another_root(original, self, engine, groups):
    original(self, engine, groups)
    self.last = groups.rank


def _one_batch_more(original, engine, batches, count, *args):
    return original(engine, batches, count + 1, *args)


def _groups_in_another_order(original, self, ranks, *axes):
    return original(self, ranks[:, ::-1], *axes)


def _nothing(original, *args, **kwargs):
    return None


def _own_mean(original, self):
    return self._total.item()


FAULTS = {
    "a skipped collective": ({"dp": 2}, meter.Meter, "mean", on(1, _own_mean), "meter.py"),
    "another order": ({"dp": 2}, loop.TrainingLoop, "__post_init__", on(1, _in_another_order), ""),
    "another group": (
        {"dp": 2, "tp": 2}, Groups, "sum_over_data", on(3, _over_the_tensor_group), "meter.py",
    ),
    "another shape": ({"dp": 2}, meter.Meter, "mean", on(1, _another_shape), "meter.py"),
    "another data type": ({"dp": 2}, meter.Meter, "reset", on(1, _another_dtype), "meter.py"),
    "another reduction": ({"dp": 2}, Groups, "sum_over_data", on(1, _largest), "meter.py"),
    "a missing send": (
        {"pp": 2}, schedule.TrainSchedule, "steps", on(0, _without_a_send), "pipe/engine.py",
    ),
    "a send and a receive exchanged": (
        {"pp": 2}, schedule.TrainSchedule, "steps", on(1, _receives_first), "pipe/engine.py",
    ),
    "another root": (
        {"pp": 2}, pipeline_engine.PipelineLosses, "__init__", on(0, _another_root),
        "pipeline_engine.py",
    ),
    "validation on one rank": (
        {"tp": 2}, validation.Validation, "_validate", on(1, _nothing), "held_out.py",
    ),
    "one batch more on one rank": (
        {"tp": 2}, held_out, "loss_of_batches", on(1, _one_batch_more), "held_out.py",
    ),
    "a save on rank 0 alone": ({"dp": 2}, async_save.Saver, "save", on(1, _nothing), "write.py"),
    "a thread that does not complete its save": (
        {"dp": 2, "async_save": True}, async_save, "complete", on(1, _nothing), "write.py",
    ),
    "groups created in another order": (
        {"dp": 2, "tp": 2}, Groups, "_group_along", on(1, _groups_in_another_order), "groups.py",
    ),
}  # fmt: skip
"""Name -> the layout, the place and the function of the fault, and the file that is to be named."""


def _sums(*order: str) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator: ranks 0 and 1 also sum over groups in `order`, the others in reverse."""

    def wrap(original: Wrapper) -> Wrapper:
        def after_step(self, step):
            original(self, step)
            groups, x = self.groups, torch.ones(1)
            here = order if groups.rank < 2 else order[::-1]
            for name in here:
                dist.all_reduce(x, group=groups.data if name == "data" else groups.model.group)

        return after_step

    return wrap


HARMLESS = {
    "no change": ({"dp": 2}, step_log.StepLog, "after_step", lambda original: original),
    # Ranks 0 and 1 form a tensor group, and ranks 2 and 3. Neither waits for the other in it.
    "another order on independent groups": (
        {"dp": 2, "tp": 2}, step_log.StepLog, "after_step", _sums("tensor", "data"),
    ),
}  # fmt: skip
NAMES = {"tp": "model_parallel_size", "pp": "pipe_parallel_size", "dp": "data"}


def rehearsed(folder: Path, prefix: str, names: list[str]) -> dict[str, str]:
    """Rehearse a small job with each fault, and return what each rehearsal says."""
    found = {}
    for name in names:
        layout, owner, attribute, faulty, *_ = {**FAULTS, **HARMLESS}[name]
        sizes = {NAMES[k]: v for k, v in layout.items() if k in NAMES}
        size = 1
        for each in sizes.values():
            size *= each
        sizes.pop("data", None)
        keys = sizes | {k: v for k, v in layout.items() if k not in NAMES}
        path = write_config(
            folder / "c.yml", prefix, train_batch_size=16, gradient_accumulation_steps=4, **keys
        )

        def load(*changes: str, path: Path = path, size: int = size) -> Any:
            return load_config([path], changes, world_size=size)

        with mock.patch.object(owner, attribute, faulty(getattr(owner, attribute))):
            try:
                found[name] = rehearse(load, train)
            except RehearsalError as error:
                found[name] = f"error: {error}"
    return found
