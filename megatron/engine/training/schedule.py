"""Learning rate by step, in the published code's form.

With n = min(step, E - W), warm-up length W and E = lr_decay_iters:

    n <= W (by step)   start * n / W
    linear             start * (E - m) / E          m = n - W
    cosine             start / 2 * (cos(pi m / E) + 1)
    exponential        start * exp(-0.693 m / E)
    constant           start

and never below min_lr after warm-up. The rate therefore stays constant for the last W steps before
E, and a cosine ends slightly above zero: the released checkpoints were trained this way.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron.config import Config

STYLES = ("constant", "linear", "cosine", "exponential")


@dataclass(frozen=True)
class Schedule:
    """A learning-rate curve. `warmup_iter` may be fractional (0.01 of 150 iterations is 1.5)."""

    start_lr: float
    end_iter: int
    warmup_iter: float = 0.0
    decay_style: str = "linear"
    min_lr: float = 0.0

    def __post_init__(self):
        if self.decay_style not in STYLES:
            raise ValueError(f"lr_decay_style {self.decay_style!r} is not one of {STYLES}")

    def __call__(self, step: int) -> float:
        """Rate after `step` optimizer steps: the first update uses the rate of step 0."""
        n = min(step, self.end_iter - self.warmup_iter)
        if self.warmup_iter > 0 and step <= self.warmup_iter:
            return self.start_lr * n / self.warmup_iter
        m = n - self.warmup_iter
        if self.decay_style == "linear":
            lr = self.start_lr * (self.end_iter - m) / self.end_iter
        elif self.decay_style == "cosine":
            lr = self.start_lr / 2.0 * (math.cos(math.pi * m / self.end_iter) + 1)
        elif self.decay_style == "exponential":
            lr = self.start_lr * math.exp(-0.693 * m / self.end_iter)
        else:
            lr = self.start_lr
        return max(lr, self.min_lr)


def schedule_of(config: Config) -> Schedule:
    """The config's learning-rate curve."""
    decay_iters = config.lr.decay_iters or max(1, config.training.train_iters)
    return Schedule(
        start_lr=config.optimizer.lr,
        end_iter=decay_iters,
        warmup_iter=config.lr.warmup * decay_iters,
        decay_style=config.lr.decay_style,
        min_lr=config.lr.min_lr,
    )


class AnnealingLR:
    """Writes the rate of a `Schedule` into an optimizer; the DeepSpeed engine steps it.

    A resumed run continues its configured curve at the checkpoint's step, so that one changed key
    makes a longer or gentler run. With `use_checkpoint` (GPT-NeoX's `use_checkpoint_lr_scheduler`)
    it continues the checkpoint's curve instead.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, use_checkpoint: bool = False
    ):
        self.optimizer, self.schedule, self.use_checkpoint = optimizer, schedule, use_checkpoint
        self.num_iters = 0
        self.write()

    def step(self, increment: int | None = None) -> None:
        """Advance by one optimizer step. DeepSpeed passes `increment`; it is not used."""
        self.num_iters += 1
        self.write()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self.schedule), "num_iters": self.num_iters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.num_iters = int(state.pop("num_iters"))
        if self.use_checkpoint:
            self.schedule = Schedule(**state)
        self.write()

    def write(self) -> None:
        """Put the current rate into the optimizer."""
        lr = self.schedule(self.num_iters)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
