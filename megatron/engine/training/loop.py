"""Run the training loop.

One step accumulates gradients over the micro-batches, clips them, updates the weights, advances the
learning-rate schedule, and clamps theta (the learned parameters of the positional embedding) to its
bounds. Everything else is a hook: guards, logs, validation, checkpoints. Checkpoints record the
state of all hooks, so a resumed run takes the same steps as an uninterrupted run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from typing import Any, cast

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megatron import preemption
from megatron.config import Config
from megatron.data.samples.loader import TrainLoader
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.bad_loss import explained_overflow
from megatron.engine.training.batches import ALL_TARGETS, Counting, cut, next_batches
from megatron.engine.training.hooks import Hook, Step
from megatron.engine.training.optimizer import gradient_norm, mark_sharded_gradients
from megatron.engine.training.trained_theta import TrainedTheta
from megatron.parallel.groups import Groups
from megatron.parallel.loss import mean_loss


def train_step(
    engine: deepspeed.DeepSpeedEngine,
    batches: Iterator[np.ndarray],
    accumulation: int,
    groups: Groups,
    hooks: Sequence[Hook] = (),
    counting: Counting = ALL_TARGETS,
) -> tuple[torch.Tensor, float | torch.Tensor | None]:
    """Take one optimizer step.

    Args:
        batches: This rank's micro-batches.
        accumulation: The number of micro-batches in the step.
        hooks: The hooks that may change the loss of the last micro-batch.
        counting: The rules for averaging the losses.

    Returns:
        This rank's loss (a 0-d tensor), and the L2 norm of the gradient before clipping.
    """
    # The loss of the step is the mean of this rank's loss over the data-parallel ranks. A pipeline
    # ignores the hooks.
    micro_batches = next_batches(batches, accumulation, groups, counting)
    if isinstance(engine, PipelineEngine):
        # A pipeline's last stage gets the divisor beside the targets.
        pairs = [(x, y if divisor is None else (y, divisor)) for x, y, divisor in micro_batches]
        engine.train_batch(iter(pairs))
        return engine.dp_group_loss, engine.get_global_grad_norm()  # the same on every stage
    model = cast(nn.Module, engine.module)
    total = torch.zeros((), device=groups.device)
    norm = None
    for inputs, targets, divisor in micro_batches:
        loss = mean_loss(engine(inputs, targets), targets, divisor)
        total += loss.detach().float()
        if engine.is_gradient_accumulation_boundary():
            mean = total / accumulation
            for hook in hooks:
                loss = hook.changed_loss(loss, mean)
        engine.backward(loss)
        if not engine.zero_optimization() and engine.is_gradient_accumulation_boundary():
            mark_sharded_gradients(model)
            if not engine.bfloat16_enabled():
                # Without ZeRO, DeepSpeed computes no norm for fp32 training, and for fp16 training
                # a norm that is multiplied by the loss scale.
                scale = getattr(engine.optimizer, "loss_scale", 1.0)
                norm = gradient_norm(model, groups.model) / scale
        engine.step()
    if norm is None:
        norm = engine.get_global_grad_norm()
    return total / accumulation, norm


@dataclass
class TrainingLoop:
    """A loop that takes training steps and calls the hooks around them.

    Args:
        hooks: The hooks, in the order in which they are called after a step.
        state: The state of the hooks, from the checkpoint that the run resumes from. Empty in a new
            run.
        counting: The rules that say which targets count in the loss.
    """

    config: Config
    engine: deepspeed.DeepSpeedEngine
    groups: Groups
    theta: TrainedTheta
    log: RunLog
    hooks: Sequence[Hook]
    state: InitVar[Mapping[str, Any]]
    counting: Counting = ALL_TARGETS

    def __post_init__(self, state: Mapping[str, Any]) -> None:
        self._length = 0
        for hook in self.hooks:
            hook.load_state(state)

    def run(self, batches: TrainLoader, first_step: int) -> None:
        """Take the steps after `first_step`, up to the config's last step.

        A signal or a limit of time or steps may end the loop earlier.

        Args:
            batches: This rank's micro-batches of B sequences with T targets, int64 [B, T + 1].
            first_step: The number of steps that were taken before.

        Raises:
            BadLossError: A step was bad, and the run does not skip such steps. A step is bad if its
                loss, its gradient or a weight is not finite, or if its loss is a spike. No
                checkpoint is written then.
            DivergedError: Too many steps in a row were skipped.
            Leave: The job must end while it repeats a validation that an earlier job did not
                complete.
        """
        # The last step is `train_iters`, or a step that is a multiple of `exit_interval`, or the
        # step after which `preemption` ends the job.
        training = self.config.training
        self.engine.train()
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook)
            for hook in self.hooks:
                hook.begin(first_step)
            for number in range(first_step + 1, training.train_iters + 1):
                for hook in reversed(self.hooks):
                    hook.before_step(number)
                step = self._take_step(number, batches)
                for hook in self.hooks:
                    hook.after_step(step)
                if step.leaves:
                    return
                if self._exits_after(number) and not step.last:
                    interval = training.exit_interval
                    self.log.line(f"leaving at step {number}: exit_interval {interval}")
                    return

    def _take_step(self, number: int, batches: TrainLoader) -> Step:
        c, checkpoint, training = self.config, self.config.checkpoint, self.config.training
        lr = self.engine.get_lr()[0]
        accumulation, length = c.batch.gradient_accumulation_steps, c.length_of(number)
        if length != self._length and isinstance(self.engine, PipelineEngine):
            self.engine.reset_activation_shape()  # the stages tell each other the new shape
        self._length = length
        arrays = cut(batches, length)
        with explained_overflow(self.engine, number):
            loss, norm = train_step(
                self.engine, arrays, accumulation, self.groups, self.hooks, self.counting
            )
        self.theta.project()
        last, leaves = number == training.train_iters, preemption.current.due()
        at_interval = bool(checkpoint.save_interval) and number % checkpoint.save_interval == 0
        asked = at_interval or number in checkpoint.extra_save_iters
        return Step(
            number=number, lr=lr, loss=loss, norm=norm, consumed_samples=batches.consumed_samples,
            batch_size=c.batch.train_batch_size, last=last, leaves=leaves,
            logs=last or number % training.log_interval == 0,
            validates=number % training.eval_interval == 0,
            saves=last or leaves or asked or self._exits_after(number),
        )  # fmt: skip

    def _exits_after(self, number: int) -> bool:
        interval = self.config.training.exit_interval
        return interval is not None and number % interval == 0
