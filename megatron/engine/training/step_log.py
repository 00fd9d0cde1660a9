"""Log the loss, the speed and theta every `log_interval` steps, and check that the loss is finite.

Before each checkpoint, check that all weights are finite.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import deepspeed
from torch import nn

from megatron.config import Config
from megatron.engine.errors import BadLossError
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.bad_loss import ADVICE
from megatron.engine.training.compiled import Compilations
from megatron.engine.training.hooks import Hook, Step
from megatron.engine.training.meter import Meter
from megatron.engine.training.optimizer import all_finite
from megatron.engine.training.speed import Speed
from megatron.engine.training.trained_theta import TrainedTheta
from megatron.parallel.groups import Groups
from megatron.readable_numbers import clock

STEEP = 3.0
"""The log warns if the mean loss rises by more nats than this from one log line to the next."""


@dataclass
class StepLog(Hook):
    """A hook that logs the mean loss since the last log line, the speed, and theta.

    Theta is the learned parameters of the positional embedding.
    """

    # These parameters are called theta. Skipped steps do not count in the mean loss.

    config: Config
    engine: deepspeed.DeepSpeedEngine
    groups: Groups
    theta: TrainedTheta
    speed: Speed
    log: RunLog

    def __post_init__(self) -> None:
        self._compilations = Compilations(self.config.training.torch_compile)
        self._said, self._seconds = "", 0.0  # of the last log line: loss and rate, s per step

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._meter = Meter(self.groups, state)
        self._last_mean = math.inf

    def state(self) -> dict[str, Any]:
        return self._meter.state()

    def before_step(self, number: int) -> None:
        self._start = time.monotonic()

    def after_step(self, step: Step) -> None:
        """Add the step to the mean loss. At the end of each log interval, write a log line.

        Raises:
            BadLossError: The loss or a weight is not finite.
        """
        # The loss must be finite at each log line. The loss and all weights must be finite at each
        # checkpoint.
        if step.good:
            self._meter.add(step.loss)
        graphs = self._compilations.metrics()
        mean = self._finite_loss(step) if step.logs or step.may_save else math.nan
        # The loss was computed before the update, so it does not show what the update did.
        if step.may_save and not all_finite(cast(nn.Module, self.engine.module), self.groups):
            raise BadLossError(f"weights are no longer finite after step {step.number}; {ADVICE}")
        self._meter.time(time.monotonic() - self._start)
        if step.logs:
            self._log(step, mean, graphs)
            self._meter.reset()
        live = f"{self._said} | ETA {self._eta(step)}" if self._said else "no loss yet"
        self.log.progress(step.number, self.config.training.train_iters, live)

    def _eta(self, step: Step) -> str:
        return clock((self.config.training.train_iters - step.number) * self._seconds)

    def _finite_loss(self, step: Step) -> float:
        """Return the mean loss of all ranks since the last log line.

        Raises:
            BadLossError: The loss is not finite, and the run does not train in fp16.
        """
        # Skipped steps do not count.
        steps, mean = self._meter.steps, self._meter.mean()
        # In fp16 training, DeepSpeed skips steps with a loss or gradient that is not finite.
        if steps and not math.isfinite(mean) and self.config.training.precision != "fp16":
            samples = step.samples(steps)
            raise BadLossError(f"the loss is {mean} at step {step.number}, {samples}; {ADVICE}")
        if step.logs and mean > self._last_mean + STEEP:
            self.log.line(
                f"  the loss rose from {self._last_mean:.4f} to {mean:.4f}: see the keys "
                "loss_spike_threshold and on_bad_loss"
            )
        self._last_mean = mean if steps and step.logs else self._last_mean
        return mean

    def _log(self, step: Step, loss: float, graphs: Mapping[str, int]) -> None:
        training, length = self.config.training, self.config.model.seq_length
        seconds = self._meter.seconds_per_step
        rate = step.batch_size * length / seconds
        after = step.number - self._meter.timed
        lengths = [*map(self.config.length_of, range(after + 1, step.number + 1))]
        values: dict[str, Any] = {
            "train/loss": loss,
            "train/lr": step.lr,
            "train/tokens_per_second": rate,
            "train/samples_per_second": step.batch_size / seconds,
            "train/seconds_per_step": seconds,
            **self.speed.metrics(rate, lengths, self.groups.device),
            **graphs,
            "train/samples": step.consumed_samples,
            "train/tokens": step.consumed_samples * length,
        }
        if training.precision == "fp16":
            values["train/loss_scale"] = getattr(self.engine.optimizer, "loss_scale", 1.0)
        said = f"loss {loss:.4f}" if self._meter.steps else "updates skipped"
        text = f"step {step.number}/{training.train_iters} | {said} | lr {step.lr:.2e}"
        if step.norm is not None:
            values["train/grad_norm"] = float(step.norm)
            text += f" | grad norm {float(step.norm):.3f}"
        self._said, self._seconds = f"{said} | {rate:,.0f} tokens/s", seconds
        text += f" | {rate:,.0f} tokens/s"
        eta = f" | ETA {self._eta(step)}"
        shown, ends = [], []
        for name, column in self.theta.columns().items():
            low, high = column.min().item(), column.max().item()
            values |= {f"theta/{name}_min": low, f"theta/{name}_max": high}
            values[f"theta/{name}"] = column.tolist()
            shown.append(f"{name} {low:.3g}..{high:.3g}")
            ends += low, high
        theta = f" | theta {', '.join(shown)}" if shown else ""
        # A terminal has the time left in its progress line, too.
        short = [f"{text} | theta {min(ends):.2g}..{max(ends):.2g}"] if shown else []
        self.log.metrics(step.number, values, text + eta + theta, *short, text)
