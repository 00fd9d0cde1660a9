"""Collect the config values that the training loop and the log of a run read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.engine.training.log import RunLog
from megatron.engine.training.speed import UNKNOWN, Speed, flops_per_token, known_peak
from megatron.model.shape import GPTShape
from megatron.parallel.groups import Groups

WANDB_KEYS = ("wandb_project", "wandb_team", "wandb_group", "wandb_host", "wandb_mode")


@dataclass(frozen=True)
class LoopSettings:
    """The config values that the training loop reads. Most fields have the name of a config key.

    Attributes:
        accumulation: the number of micro-batches per step (`gradient_accumulation_steps`).
        skips_overflow: whether DeepSpeed skips a step whose gradients overflow, as in fp16.
        uncounted_after: the id of a token; targets that follow it do not count in the loss. None
            counts all targets.
        compiles: whether the model is compiled (`torch_compile`).
        speed: what a token costs, and what the device can do.
    """

    train_iters: int
    accumulation: int
    seq_length: int
    train_batch_size: int
    log_interval: int
    eval_interval: int
    save_interval: int | None
    extra_save_iters: tuple[int, ...] = ()
    exit_interval: int | None = None
    skips_overflow: bool = False
    on_bad_loss: str = "stop"
    loss_spike_threshold: float | None = None
    uncounted_after: int | None = None
    compiles: bool = False
    speed: Speed = UNKNOWN

    def leaves_after(self, step: int) -> bool:
        return self.exit_interval is not None and step % self.exit_interval == 0

    def saves_after(self, step: int) -> bool:
        """Return whether the config asks for a checkpoint after `step`."""
        at_interval = bool(self.save_interval) and step % self.save_interval == 0
        return at_interval or step in self.extra_save_iters


def loop_settings(
    c: Config, uncounted_after: int | None, shape: GPTShape, groups: Groups
) -> LoopSettings:
    """Return the training loop's settings, read from the config `c`."""
    return LoopSettings(
        train_iters=c.training.train_iters,
        accumulation=c.batch.gradient_accumulation_steps,
        seq_length=c.model.seq_length,
        train_batch_size=c.batch.train_batch_size,
        log_interval=c.training.log_interval,
        eval_interval=c.training.eval_interval,
        save_interval=c.checkpoint.save_interval,
        extra_save_iters=tuple(c.checkpoint.extra_save_iters),
        exit_interval=c.training.exit_interval,
        skips_overflow=c.training.precision == "fp16",
        on_bad_loss=c.training.on_bad_loss,
        loss_spike_threshold=c.training.loss_spike_threshold,
        uncounted_after=uncounted_after,
        compiles=c.training.torch_compile,
        speed=Speed(
            flops_per_token=flops_per_token(shape, c.model.seq_length),
            devices=groups.world_size,
            peak_tflops=c.logging.peak_theoretical_tflops
            or known_peak(groups.device, c.training.precision),
        ),
    )


def open_log(
    c: Config,
    run_dir: Path,
    *,
    is_main: bool,
    step: int,
    validates_again: bool,
    confirm: Callable[[], None],
) -> RunLog:
    """Open the log of a run in `run_dir` that starts or continues at `step`; see `RunLog`."""
    trains, board = c.training.train_iters > 0, c.logging.tensorboard_dir
    return RunLog(
        run_dir,
        is_main=is_main,
        use_wandb=c.logging.use_wandb,
        wandb_options={key: getattr(c.logging, key) for key in WANDB_KEYS},
        tensorboard=Path(board) / run_dir.resolve().name if board else None,
        config=c.to_flat_dict(),
        append=step > 0 or not trains,
        last_step=step if trains else None,
        validates_again=validates_again,
        confirm=confirm,
    )
