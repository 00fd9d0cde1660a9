"""Run the training loop.

One step accumulates gradients over the micro-batches, clips them, updates the weights, advances the
learning-rate schedule, and clamps theta (the learned parameters of the positional embedding) to its
bounds. Checkpoints record all state of the loop, so a resumed run takes the same steps as an
uninterrupted run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megatron import preemption
from megatron.data.samples.loader import TrainLoader
from megatron.engine.errors import BadLossError
from megatron.engine.training.bad_loss import ADVICE, LossGuard, explained_overflow
from megatron.engine.training.batches import next_batches
from megatron.engine.training.compiled import Compilations
from megatron.engine.training.log import RunLog
from megatron.engine.training.meter import Meter
from megatron.engine.training.optimizer import all_finite, gradient_norm, mark_sharded_gradients
from megatron.engine.training.pipeline import train_batch
from megatron.engine.training.rows import clock, described, perplexities
from megatron.engine.training.settings import LoopSettings
from megatron.engine.training.theta import TrainedTheta
from megatron.parallel.groups import Groups
from megatron.parallel.loss import mean_loss

STEEP = 3.0
"""The log warns if the mean loss rises by more nats than this from one log line to the next."""


def train_step(
    engine: deepspeed.DeepSpeedEngine,
    batches: Iterator[np.ndarray],
    accumulation: int,
    groups: Groups,
    guard: LossGuard | None = None,
    uncounted_after: int | None = None,
) -> tuple[torch.Tensor, float | torch.Tensor | None]:
    """Take one optimizer step, on the next `accumulation` micro-batches.

    Args:
        guard: the object that makes DeepSpeed skip the update of a bad step; None skips no step.
        uncounted_after: the id of a token; targets that follow it do not count in the loss.

    Returns:
        This rank's mean loss (a 0-d tensor, not averaged over the data-parallel ranks), and the L2
        norm of the gradient before clipping.
    """
    pairs = next_batches(batches, accumulation, groups, uncounted_after)
    if isinstance(engine, PipelineEngine):
        loss = train_batch(engine, list(pairs))
        return loss, engine.get_global_grad_norm()
    total = torch.zeros((), device=groups.device)
    norm = None
    for inputs, targets in pairs:
        loss = mean_loss(engine(inputs, targets), targets)
        total += loss.detach().float()
        if guard and engine.is_gradient_accumulation_boundary():
            loss = guard.spoiled_if_bad(loss, total / accumulation)
        engine.backward(loss)
        if not engine.zero_optimization() and engine.is_gradient_accumulation_boundary():
            mark_sharded_gradients(_model(engine))
            if not engine.bfloat16_enabled():
                # Without ZeRO, DeepSpeed computes no norm for fp32 training, and for fp16 training
                # a norm that is multiplied by the loss scale.
                scale = getattr(engine.optimizer, "loss_scale", 1.0)
                norm = gradient_norm(_model(engine), groups.model) / scale
        engine.step()
    if norm is None:
        norm = engine.get_global_grad_norm()
    return total / accumulation, norm


def _model(engine: deepspeed.DeepSpeedEngine) -> nn.Module:
    return cast(nn.Module, engine.module)


class TrainingLoop:
    """A loop that takes training steps, and logs, validates and saves as `settings` ask.

    Args:
        carried: the loop's state, read from the checkpoint that the run resumes from (see
            `TrainingProgress.interval`). It is empty in a new run.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        groups: Groups,
        theta: TrainedTheta,
        settings: LoopSettings,
        log: RunLog,
        carried: Mapping[str, Any] | None = None,
    ):
        self.engine, self.groups, self.theta = engine, groups, theta
        self.settings, self.log = settings, log
        self._carried = carried or {}
        self._meter = Meter(groups, self._carried)
        self._compilations = Compilations(settings.compiles)
        self._guard = LossGuard(
            engine,
            groups,
            settings.on_bad_loss,
            settings.loss_spike_threshold,
            self._carried.get("average_loss"),
        )
        self._last_mean = math.inf

    def run(
        self,
        batches: TrainLoader,
        first_step: int,
        *,
        validate: Callable[[int], dict[str, float]],
        save: Callable[[int, dict[str, Any]], None],
        check: Callable[[], None],
    ) -> None:
        """Take the steps after `first_step`, up to step `train_iters`.

        The loop ends earlier after a step that is a multiple of `exit_interval`, or when a signal
        or the time limit ends the job (see `preemption`).

        Args:
            batches: this rank's micro-batches of B sequences with T targets, int64 [B, T + 1].
            first_step: the number of steps that were taken before.
            validate: a function from step to a validation's metrics, called every `eval_interval`
                steps. If it raises `preemption.Leave`, the loop ends.
            save: a function of (step, the loop's state) that writes a checkpoint with both. It is
                called every `save_interval` steps, after `extra_save_iters`, and at the end.
            check: a function to call before each step. An error that it raises ends the run.

        Raises:
            BadLossError: the loss or a weight is not finite, or the loss is a spike that the run
                does not skip. No checkpoint is written then.
            DivergedError: too many steps in a row were skipped.
        """
        settings, meter = self.settings, self._meter
        self.engine.train()
        if self._carried.get("owes_validation") and not self._validates(first_step, validate):
            return
        for step in range(first_step + 1, settings.train_iters + 1):
            check()
            start = time.monotonic()
            lr = self.engine.get_lr()[0]
            norm = self._take_step(step, batches)
            leaves = preemption.due()
            last = step == settings.train_iters
            saves = last or leaves or settings.leaves_after(step) or settings.saves_after(step)
            logs = last or step % settings.log_interval == 0
            mean = self._finite_loss(step, batches) if logs or saves else math.nan
            # The loss was computed before the update, so it does not show what the update did.
            if saves and not all_finite(_model(self.engine), self.groups):
                raise BadLossError(f"weights are no longer finite after step {step}; {ADVICE}")
            meter.seconds += time.monotonic() - start
            if logs:
                self._log_step(step, mean, lr, norm, batches.consumed_samples)
                meter.reset()
            owes = step % settings.eval_interval == 0
            if owes and not leaves:
                owes = leaves = not self._validates(step, validate)
            if saves or leaves:
                owed = {"owes_validation": True} if owes else {}
                save(step, meter.state() | self._guard.state() | owed)
            if leaves:
                return
            if settings.leaves_after(step) and not last:
                self.log.line(f"leaving at step {step}: exit_interval {settings.exit_interval}")
                return

    def _take_step(self, step: int, batches: TrainLoader) -> float | torch.Tensor | None:
        """Take one optimizer step, and return the norm of its gradient.

        If the step is not bad (see `bad_loss`), its loss is added to the meter.
        """
        guard = self._guard
        with explained_overflow(self.engine, step):
            loss, norm = train_step(
                self.engine,
                batches,
                self.settings.accumulation,
                self.groups,
                guard if guard.skips else None,
                self.settings.uncounted_after,
            )
        self.theta.project()
        if not guard.acts or self._is_good(step, loss, norm, batches):
            self._meter.add(loss)
        if news := self._compilations.news():
            self.log.line(f"  step {step}: {news}")
        self.log.progress(step, self.settings.train_iters)
        return norm

    def _validates(self, step: int, validate: Callable[[int], dict[str, float]]) -> bool:
        """Log the validation loss; return False if the job ends before that loss is computed."""
        try:
            self._log_validation(step, validate(step))
        except preemption.Leave:
            return False
        return True

    def _is_good(
        self, step: int, loss: torch.Tensor, norm: float | torch.Tensor | None, batches: TrainLoader
    ) -> bool:
        """Return whether the step was good. If its update was skipped, log that.

        Raises:
            BadLossError: the step was bad, and the run does not skip bad steps.
        """
        problem = self._guard.judge(loss, norm)
        if not problem:
            return True
        text = f"{problem} at step {step}, {_samples(batches, self.settings.train_batch_size)}"
        if not self._guard.skips:
            raise BadLossError(f"{text}; {ADVICE}")
        self.log.line(f"  {text}: its update is skipped")
        return False

    def _finite_loss(self, step: int, batches: TrainLoader) -> float:
        """Return the mean loss of the good steps since the last log line, over all ranks.

        Raises:
            BadLossError: the loss is not finite. Under fp16 there is no error, because DeepSpeed
                skips steps that are not finite.
        """
        steps, mean = self._meter.steps, self._meter.mean()
        if steps and not math.isfinite(mean) and not self.settings.skips_overflow:
            samples = _samples(batches, steps * self.settings.train_batch_size)
            raise BadLossError(f"the loss is {mean} at step {step}, {samples}; {ADVICE}")
        if mean > self._last_mean + STEEP:
            self.log.line(
                f"  the loss rose from {self._last_mean:.4f} to {mean:.4f}: see the keys "
                "loss_spike_threshold and on_bad_loss"
            )
        self._last_mean = mean if steps else self._last_mean
        return mean

    def _log_step(
        self, step: int, loss: float, lr: float, norm: float | torch.Tensor | None, samples: int
    ) -> None:
        settings = self.settings
        seconds = self._meter.seconds_per_step
        rate = settings.train_batch_size * settings.seq_length / seconds
        values: dict[str, Any] = {
            "train/loss": loss,
            "train/lr": lr,
            "train/tokens_per_second": rate,
            **settings.speed.metrics(rate, self.groups.device),
            **self._compilations.metrics(),
            "train/samples": samples,
            "train/tokens": samples * settings.seq_length,
        }
        if settings.skips_overflow:
            values["train/loss_scale"] = getattr(self.engine.optimizer, "loss_scale", 1.0)
        text = f"step {step}/{settings.train_iters} | loss {loss:.4f} | lr {lr:.2e}"
        if norm is not None:
            values["train/grad_norm"] = float(norm)
            text += f" | grad norm {float(norm):.3f}"
        eta = (settings.train_iters - step) * seconds
        text += f" | {rate:,.0f} tokens/s | ETA {clock(eta)}"
        shown = []
        for name, column in self.theta.columns().items():
            low, high = column.min().item(), column.max().item()
            values |= {f"theta/{name}_min": low, f"theta/{name}_max": high}
            values[f"theta/{name}"] = column.tolist()
            shown.append(f"{name} {low:.3g}..{high:.3g}")
        text += " | theta " + ", ".join(shown) if shown else ""
        self.log.metrics(step, values, text=text)

    def _log_validation(self, step: int, found: dict[str, float]) -> None:
        if found:
            text = f"  validation at step {step}: {described(found)}"
            self.log.metrics(step, found | perplexities(found), text=text)


def _samples(batches: TrainLoader, count: int) -> str:
    last = batches.consumed_samples - 1
    return f"samples {last + 1 - count} to {last} of the split train"
