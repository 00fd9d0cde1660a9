"""Use a DeepSpeed engine in the same way for a plain model and for a stage of a pipeline.

The training loop gives every stage of a pipeline the same batches, so that all ranks count the same
samples. Only the first stage uses the inputs, and only the last stage uses the targets.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron import preemption
from megatron.engine.training.batches import ALL_TARGETS, Counting, next_batches
from megatron.parallel.groups import Groups
from megatron.parallel.loss import UNCOUNTED, mean_loss

Engine = deepspeed.DeepSpeedEngine
LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of (inputs, targets) that returns each target's loss in nats; all are [B, T]."""


class PipelineLosses:
    """A function of (inputs, targets) that returns the loss of each target, in nats.

    Inputs, targets and losses have the shape [batch, positions], which may differ between calls.
    Every stage of the pipeline must call the function, and every stage gets the losses.
    """

    def __init__(self, engine: PipelineEngine, groups: Groups):
        self.engine, self.groups = engine, groups
        self.multiple = groups.model.size if groups.model.splits_sequence else 1
        assert groups.pipe is not None  # a job of one stage has no pipeline engine
        self.last = dist.get_global_rank(groups.pipe, groups.pipe_size - 1)

    @torch.no_grad()
    def __call__(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        engine = self.engine
        engine.reset_activation_shape()
        engine.total_loss = None  # otherwise DeepSpeed would add the losses of the previous call
        padding = (0, -inputs_BT.shape[1] % self.multiple)  # causal attention ignores it
        batch = iter([(F.pad(inputs_BT, padding), F.pad(targets_BT, padding))])
        found: Any = engine.eval_batch(
            batch,
            reduce_output=None,  # pyright: ignore[reportArgumentType]  returns a list of tensors
            bcast_loss=False,
            num_micro_batches=1,
        )
        engine.reset_activation_shape()
        if engine.is_last_stage():
            losses_BT = found[0][:, : inputs_BT.shape[1]].float().contiguous()
        else:
            losses_BT = torch.empty(inputs_BT.shape, device=self.groups.device)
        dist.broadcast(losses_BT, src=self.last, group=self.groups.pipe)
        return losses_BT


def loss_function(engine: deepspeed.DeepSpeedEngine, groups: Groups) -> LossFn:
    """Return the engine's model, pipelined or not, as a `LossFn` that every rank can call."""
    return PipelineLosses(engine, groups) if isinstance(engine, PipelineEngine) else engine


@contextmanager
def never_compiled() -> Iterator[None]:
    """Run models in the `with` block, or in the decorated function, without `torch.compile`."""
    # The config key `torch_compile` is for training steps, whose shapes stay the same.
    compiles = "torch._dynamo" in sys.modules  # importing the compiler takes a second
    with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        yield


@never_compiled()
@torch.no_grad()
def loss_of_batches(
    engine: deepspeed.DeepSpeedEngine,
    batches: Iterator[np.ndarray],
    count: int,
    groups: Groups,
    counting: Counting = ALL_TARGETS,
) -> float:
    """Return the mean loss over the next `count` micro-batches of every data-parallel rank.

    Every rank must call this function, and every rank gets the same result.

    Args:
        batches: This rank's micro-batches of B sequences with T targets, int64 [B, T + 1].
        counting: The rules that say which targets count in the loss, and with which weight.
    """
    # If `counting.per_token` is true, all targets that count have the same weight in the mean.
    # Otherwise, all micro-batches have the same weight.
    engine.eval()
    loss_fn = loss_function(engine, groups)
    # Sums of the losses and of their weights; fp32 cannot count beyond 2^24 targets.
    total, weights = torch.zeros(2, dtype=torch.float64, device=groups.device)
    read_singly = replace(counting, per_token=False)
    for inputs, targets, _ in next_batches(batches, count, groups, read_singly):
        preemption.safe_point()
        weight = (targets != UNCOUNTED).sum() if counting.per_token else 1
        total += mean_loss(loss_fn(inputs, targets), targets).double() * weight
        weights += weight
    engine.train()
    return groups.sum_over_data(total).item() / max(1, groups.sum_over_data(weights).item())
