"""The training loop.

One step: accumulate gradients over the micro-batches, clip, update, advance the schedule, project
theta onto its bounds. The loop owns no state that a checkpoint does not hold, so a resumed run
takes the same steps as one that was never interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import deepspeed
import numpy as np
import torch

from megatron.engine.errors import DivergedError
from megatron.engine.evaluation.losses import LossFn
from megatron.engine.training.diverged import MEND, least_scale_told
from megatron.engine.training.log import RunLog
from megatron.engine.training.optimizer import (
    all_finite,
    all_heads,
    gradient_norm,
    mark_cut_gradients,
    project_theta,
)
from megatron.engine.training.pipeline import PipelineLosses, train_batch
from megatron.parallel import Groups

Bounds = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LoopSettings:
    """The config's values that the loop reads (names as in the config)."""

    train_iters: int
    accumulation: int
    seq_length: int
    train_batch_size: int
    log_interval: int
    eval_interval: int
    eval_iters: int
    save_interval: int | None
    extra_save_iters: tuple[int, ...] = ()
    exit_interval: int | None = None
    skips_overflow: bool = False
    clamps_copy_only: bool = False


@dataclass
class Meter:
    """What happened since the last log line."""

    losses: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0

    def reset(self) -> None:
        self.losses.clear()
        self.seconds, self.steps = 0.0, 0


def next_batches(
    batches: Iterator[np.ndarray], count: int, groups: Groups
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs, targets) of each of the next `count` micro-batches int64 [micro, T + 1]."""
    for _ in range(count):
        tokens = torch.from_numpy(next(batches)).to(groups.device, non_blocking=True)
        yield tokens[:, :-1], tokens[:, 1:]


def train_step(
    engine: deepspeed.DeepSpeedEngine,
    batches: Iterator[np.ndarray],
    accumulation: int,
    groups: Groups,
) -> tuple[torch.Tensor, float | None]:
    """One update. Returns this rank's mean loss (a 0-d tensor, not synchronised) and the gradient's
    norm before clipping."""
    if groups.pipe_size > 1:
        loss = train_batch(engine, list(next_batches(batches, accumulation, groups)))
        return loss, engine.get_global_grad_norm()
    total = torch.zeros((), device=groups.device)
    norm = None
    for inputs, targets in next_batches(batches, accumulation, groups):
        loss = engine(inputs, targets).mean()
        total += loss.detach().float()
        engine.backward(loss)
        if not engine.zero_optimization() and engine.is_gradient_accumulation_boundary():
            mark_cut_gradients(engine.module)
            if not engine.bfloat16_enabled():
                # Without ZeRO the engine does not say the norm in fp32, and says it times the loss
                # scale in fp16.
                scale = getattr(engine.optimizer, "loss_scale", 1.0)
                norm = gradient_norm(engine.module, groups.model) / scale
        engine.step()
    if norm is None:
        norm = engine.get_global_grad_norm()
    return total / accumulation, norm


def losses_of(engine: deepspeed.DeepSpeedEngine, groups: Groups) -> LossFn:
    """The engine's model as a function to evaluate, on every rank."""
    return engine if groups.pipe_size == 1 else PipelineLosses(engine, groups)


@torch.no_grad()
def validation_loss(
    engine: deepspeed.DeepSpeedEngine,
    batches: Iterator[np.ndarray],
    count: int,
    groups: Groups,
) -> float:
    """Mean loss over `count` micro-batches on every rank, in nats per token."""
    engine.eval()
    loss_fn = losses_of(engine, groups)
    total = torch.zeros((), device=groups.device)
    for inputs, targets in next_batches(batches, count, groups):
        total += loss_fn(inputs, targets).mean().float()
    engine.train()
    return groups.sum_over_data(total).item() / (count * groups.data_size)


def train_loop(
    engine: deepspeed.DeepSpeedEngine,
    batches: Iterator[np.ndarray],
    settings: LoopSettings,
    groups: Groups,
    log: RunLog,
    *,
    first_step: int,
    theta: torch.nn.Parameter | None,
    theta_names: tuple[str, ...],
    theta_bounds: Bounds | None,
    validate: Callable[[int], float | None],
    save: Callable[[int], None],
) -> None:
    """Run steps first_step + 1 ... train_iters.

    Args:
        validate: step -> validation loss, called every `eval_interval` steps.
        save: step -> None, called every `save_interval` steps, at `extra_save_iters`, at the end.

    Raises:
        DivergedError: the loss is not finite; the last checkpoint is left as it is.
    """
    engine.train()
    meter = Meter()
    master = None
    for step in range(first_step + 1, settings.train_iters + 1):
        start = time.monotonic()
        lr = engine.optimizer.param_groups[0]["lr"]
        with least_scale_told(engine, step):
            loss, norm = train_step(engine, batches, settings.accumulation, groups)
        if theta is not None and theta_bounds is not None:
            only = settings.clamps_copy_only
            master = project_theta(engine, theta, *theta_bounds, copy_only=only)
        meter.losses.append(loss)
        meter.steps += 1
        leaves = settings.exit_interval is not None and step % settings.exit_interval == 0
        last = step == settings.train_iters or leaves
        interval = settings.save_interval
        saves = (interval and step % interval == 0) or step in settings.extra_save_iters or last
        logs = step % settings.log_interval == 0 or last
        if logs or saves:
            mean = groups.sum_over_data(torch.stack(meter.losses).mean()) / groups.data_size
            mean = mean.item()
            if not math.isfinite(mean) and not settings.skips_overflow:
                raise DivergedError(f"the loss is {mean} at step {step}; {MEND}")
        # The loss was computed before the update: a checkpoint must not hold what came out of it.
        if saves and not all_finite(engine.module, groups):
            raise DivergedError(f"weights are no longer finite after step {step}; {MEND}")
        meter.seconds += time.monotonic() - start
        if logs:
            whole = None if master is None else all_heads(master, groups)
            _report(log, step, mean, lr, norm, meter, settings, whole, theta_names)
            meter.reset()
        if step % settings.eval_interval == 0:
            value = validate(step)
            if value is not None:
                text = f"  validation at step {step}: loss {value:.4f}, ppl {math.exp(value):.3f}"
                log.metrics(step, {"validation/loss": value}, text=text)
        if saves:
            save(step)
        if leaves and step < settings.train_iters:
            log.line(f"leaving at step {step}: exit_interval {settings.exit_interval}")
            return


def _report(
    log: RunLog,
    step: int,
    loss: float,
    lr: float,
    norm: float | torch.Tensor | None,
    meter: Meter,
    settings: LoopSettings,
    master_HN: torch.Tensor | None,
    theta_names: tuple[str, ...],
) -> None:
    rate = meter.steps * settings.train_batch_size * settings.seq_length / meter.seconds
    eta = (settings.train_iters - step) * meter.seconds / meter.steps
    values = {"train/loss": loss, "train/lr": lr, "train/tokens_per_second": rate}
    text = f"step {step}/{settings.train_iters} | loss {loss:.4f} | lr {lr:.2e}"
    if norm is not None:
        values["train/grad_norm"] = float(norm)
        text += f" | grad norm {float(norm):.3f}"
    text += f" | {rate:,.0f} tokens/s | ETA {_clock(eta)}"
    if master_HN is not None:
        columns = dict(zip(theta_names, master_HN.T, strict=True))
        if len(columns) > 4:  # a table, such as T5's
            columns = {"table": master_HN}
        ranges = []
        for name, column in columns.items():
            low, high = column.min().item(), column.max().item()
            values |= {f"theta/{name}_min": low, f"theta/{name}_max": high}
            ranges.append(f"{name} {low:.3g}..{high:.3g}")
        text += " | theta " + ", ".join(ranges)
    log.metrics(step, values, text=text)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}"
