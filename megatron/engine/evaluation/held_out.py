"""Measure the loss on the splits `valid` and `test`, during and after training."""

from __future__ import annotations

import deepspeed

from megatron.config import Config
from megatron.engine.evaluation.losses import loss_of_batches
from megatron.engine.text import JobData
from megatron.engine.training.log import RunLog
from megatron.parallel.groups import Groups


def held_out_loss(
    config: Config,
    data: JobData,
    engine: deepspeed.DeepSpeedEngine,
    groups: Groups,
    name: str,
    evaluations_before: int,
) -> float | None:
    """Return the mean loss on the split `name`, or None if the split has no batches.

    Every rank must call this function.

    Args:
        name: `valid` or `test`.
        evaluations_before: the number of earlier evaluations, whose batches are skipped.
    """
    loader = data.held_out(name, evaluations_before=evaluations_before)
    if loader is None:
        return None
    count = config.training.eval_iters * config.batch.gradient_accumulation_steps
    return loss_of_batches(engine, loader, count, groups, data.uncounted_after)


def log_final_losses(
    config: Config, data: JobData, engine: deepspeed.DeepSpeedEngine, groups: Groups, log: RunLog
) -> None:
    """Measure and log the losses on `valid` and `test` after training.

    Every rank must call this function.
    """
    t = config.training
    for name, before in (("valid", t.train_iters // t.eval_interval), ("test", 0)):
        loss = held_out_loss(config, data, engine, groups, name, before)
        if loss is not None:
            log.metrics(
                t.train_iters,
                {f"final/{name}_loss": loss},
                text=f"{name} loss after training: {loss:.4f}",
            )
