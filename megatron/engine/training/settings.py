"""Collect the config values that the training loop reads."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config


@dataclass(frozen=True)
class LoopSettings:
    """The config values that the training loop reads. Most fields have the name of a config key.

    Attributes:
        accumulation: the number of micro-batches per step (`gradient_accumulation_steps`).
        skips_overflow: whether DeepSpeed skips a step whose gradients overflow, as in fp16.
        uncounted_after: the id of a token; targets that follow it do not count in the loss. None
            counts all targets.
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

    def leaves_after(self, step: int) -> bool:
        return self.exit_interval is not None and step % self.exit_interval == 0

    def saves_after(self, step: int) -> bool:
        """Return whether the config asks for a checkpoint after `step`."""
        at_interval = bool(self.save_interval) and step % self.save_interval == 0
        return at_interval or step in self.extra_save_iters


def loop_settings(c: Config, uncounted_after: int | None) -> LoopSettings:
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
    )
