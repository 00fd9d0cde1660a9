"""Compute the learning rate of each step, by the formulas of GPT-NeoX.

Let start be the learning rate at the end of the warm-up, W the length of the warm-up in steps,
E = lr_decay_iters, n = min(step, E - W) and m = n - W:

    step <= W (warm-up)   start * n / W
    linear                start * (E - m) / E
    cosine                start / 2 * (cos(pi m / E) + 1)
    exponential           start * exp(-0.693 m / E)
    constant              start

After the warm-up, the learning rate is at least min_lr. With the styles above, the learning rate is
constant from step E - W on. Because m / E is at most 1 - 2 W / E, the cosine ends slightly above
zero. The released KERPLE checkpoints were trained with this cosine.

With `wsd` (warm-up, stable, decay; arXiv 2404.06395), the learning rate equals start until step
(1 - R) E, with R = wsd_decay_ratio. Then the learning rate decays, and reaches min_lr at step E:

    wsd                   min_lr + (start - min_lr) c(r) with r = 1 - (E - step) / (R E)

wsd_decay_style (with Megatron-LM's names) selects c(r). `cosine` agrees with GPT-NeoX's PR 1375:

    cosine                (cos(pi r) + 1) / 2
    linear                1 - r
    exponential           2 * 0.5^r - 1
    minus_sqrt            1 - sqrt(r)
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron.config import Config

STYLES = ("constant", "linear", "cosine", "exponential", "wsd")
_WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda r: (math.cos(math.pi * r) + 1) / 2,
    "linear": lambda r: 1 - r,
    "exponential": lambda r: 2 * 0.5**r - 1,
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@dataclass(frozen=True)
class Schedule:
    """A learning rate as a function of the step.

    Attributes:
        start_lr: The learning rate at the end of the warm-up.
        end_iter: The config's `lr_decay_iters`, which determines the last step of the decay.
        warmup_iter: The number of warm-up steps, which may be fractional, such as 1.5.
        decay_style: The curve after the warm-up, such as `cosine`.
        min_lr: The minimum learning rate after the warm-up.
        wsd_decay_ratio: The length of the decay of the style `wsd`, as a fraction of `end_iter`.
        wsd_decay_style: The curve of the decay of the style `wsd`, such as `cosine`.
    """

    # With the style `wsd`, the decay ends at step `end_iter`. With the other `STYLES`, the decay
    # ends at step `end_iter - warmup_iter`.

    start_lr: float
    end_iter: int
    warmup_iter: float = 0.0
    decay_style: str = "linear"
    min_lr: float = 0.0
    wsd_decay_ratio: float = 0.1
    wsd_decay_style: str = "cosine"

    def __post_init__(self):
        if self.decay_style not in STYLES:
            raise ValueError(f"lr_decay_style {self.decay_style!r} is not one of {STYLES}")

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` optimizer steps.

        The first optimizer step uses the learning rate of `step` 0.
        """
        n = step
        if self.decay_style != "wsd":
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
        elif self.decay_style == "wsd" and step > self.end_iter * (1 - self.wsd_decay_ratio):
            left = max(0, self.end_iter - step) / (self.end_iter * self.wsd_decay_ratio)
            factor = _WSD_DECAYS[self.wsd_decay_style](max(0.0, 1 - left))
            lr = self.min_lr + (self.start_lr - self.min_lr) * factor
        else:
            lr = self.start_lr
        return max(lr, self.min_lr)


def schedule_of(config: Config) -> Schedule:
    """Build the learning-rate schedule that the config describes."""
    decay_iters = config.lr.decay_iters or max(1, config.training.train_iters)
    return Schedule(
        start_lr=config.optimizer.lr, end_iter=decay_iters,
        warmup_iter=config.lr.warmup * decay_iters, decay_style=config.lr.decay_style,
        min_lr=config.lr.min_lr, wsd_decay_ratio=config.lr.wsd_decay_ratio,
        wsd_decay_style=config.lr.wsd_decay_style,
    )  # fmt: skip


class AnnealingLR:
    """A scheduler that writes the learning rate of a `Schedule` into an optimizer.

    Args:
        schedule: The schedule of this run's config.
        use_checkpoint: Whether a resumed run uses the schedule that the checkpoint records.
    """

    # The DeepSpeed engine calls `step` after each optimizer step. A resumed run starts at the
    # checkpoint's step. `use_checkpoint` is GPT-NeoX's `use_checkpoint_lr_scheduler`.

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, use_checkpoint: bool = False
    ):
        self.optimizer, self.schedule, self.use_checkpoint = optimizer, schedule, use_checkpoint
        self.num_iters = 0
        self.write()

    def step(self, increment: int | None = None) -> None:
        """Advance by one optimizer step.

        Args:
            increment: Ignored. DeepSpeed passes this argument.
        """
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
        """Write the current learning rate into the optimizer's parameter groups.

        A group with an entry `lr_multiplier` gets the learning rate times this value.
        """
        lr = self.schedule(self.num_iters)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_multiplier", 1.0)
