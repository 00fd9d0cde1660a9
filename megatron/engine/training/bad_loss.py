"""Find the steps whose loss or gradient is bad, and skip their updates.

A step is bad if its loss or the norm of its gradient is not finite, or if its loss is more than
`loss_spike_threshold` nats above the average loss of the earlier good steps. In this average, each
step has 0.9 times the weight of the next step.

If DeepSpeed itself skips an update because the gradient is not finite, the host learns this in the
same step. Otherwise, with `on_bad_loss: stop` and no `loss_spike_threshold`, the norm of a gradient
on a GPU is read only for log lines and before checkpoints. So the host does not wait for the GPU in
each step.

A skipped step does not change the weights, the moments or the learning rate. Only the step counter
advances. To skip a step, this module multiplies the loss of the last micro-batch by NaN. DeepSpeed
then finds on every rank, in every ZeRO stage, that the gradient is not finite. Therefore, DeepSpeed
skips the update, as after an fp16 overflow.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch

from megatron.config.sections.training import TrainingConfig
from megatron.engine.errors import BadLossError, DivergedError
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.hooks import Hook, Step
from megatron.parallel.groups import Groups

ADVICE = "lower the learning rate, lengthen the warm-up, or set gradient_clipping"
_SCALE_EXHAUSTED = "loss scale already at minimum"  # DeepSpeed's bare Exception under ZeRO
KEPT = 0.9
"""The weight of the old average when the loss of the next good step is added to it."""
MOST_SKIPPED = 10
"""The number of steps in a row that are skipped before the run ends."""


class LossGuard(Hook):
    """A hook that checks the loss and the gradient of each step, and can skip bad updates.

    A step is bad if its loss or its gradient is not finite. A step is also bad if its loss is far
    above the average loss of the good steps.

    Args:
        training: The config section with `on_bad_loss` and `loss_spike_threshold`. Bad steps are
            skipped if `on_bad_loss` is `skip`.
    """

    # Checkpoints record the average loss.

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        groups: Groups,
        training: TrainingConfig,
        log: RunLog,
    ):
        self.engine, self.groups, self.log = engine, groups, log
        self._threshold = training.loss_spike_threshold
        self._skips = training.on_bad_loss == "skip"
        self._acts = training.on_bad_loss != "stop" or self._threshold is not None
        self._scale_falls = training.precision == "fp16" and training.loss_scale == 0
        self._unread, self._norm = 0, 0.0  # the steps not judged yet, and their norm
        self._average: float | None = None
        self._mean: float | None = None  # of the step in progress, over all ranks
        self._skipped = 0
        if self._skips:  # else DeepSpeed would apply a bf16 gradient that is not finite
            engine.optimizer.check_grad_overflow = True  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def changed_loss(self, loss: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return NaN if the update of the step must be skipped, otherwise `loss`.

        Args:
            loss: The loss of the step's last micro-batch.
            mean: This rank's mean loss over all micro-batches of the step.
        """
        if not self._skips:
            return loss
        self._mean = self._over_ranks(mean)
        return loss * math.nan if self._problem(self._mean) else loss

    def after_step(self, step: Step) -> None:
        """Check whether the step was bad. If the update was skipped, write a log line.

        Raises:
            BadLossError: The step was bad, and the run does not skip bad steps.
        """
        applied, self._unread = self.engine.was_step_applied(), self._unread + 1
        norm = step.norm if applied else math.inf
        if norm is not None:
            # A norm that is not finite stays so until it is read.
            self._norm = norm + 0 * self._norm
        reads = self._acts or step.logs or step.may_save or self.groups.device.type == "cpu"
        if applied and not reads:
            return
        problem, samples = self.judge(step.loss, self._norm), step.samples(self._unread)
        self._unread, self._norm = 0, 0.0
        if not problem:
            step.good = applied  # DeepSpeed skips updates while it searches the scale of fp16
            return
        text = f"{problem} at step {step.number}, {samples}"
        if not self._skips:
            raise BadLossError(f"{text}; {ADVICE}")
        self.log.line(f"  {text}: its update is skipped")
        step.good = False

    def judge(self, loss: torch.Tensor, norm: float | torch.Tensor | None) -> str:
        """Return a text that names the fault of the last step, or "" if the step is good.

        Every rank must call this method.

        Args:
            loss: This rank's mean loss of the step.
            norm: The norm of the step's gradient, the same on every rank; None if unknown.

        Raises:
            DivergedError: The run skips bad steps, and too many steps in a row were bad.
        """
        # `loss` is the value before `changed_loss` changed it. At most `MOST_SKIPPED` steps in a
        # row may be bad.
        finite = norm is None or self._scale_falls or math.isfinite(float(norm))
        if finite and not self._acts:
            return ""
        mean = self._over_ranks(loss) if self._mean is None else self._mean
        self._mean = None
        problem = self._problem(mean)
        if not finite:
            problem = problem or "the norm of the gradient is not finite"
        self._skipped = self._skipped + 1 if problem else 0
        if self._skips and self._skipped == MOST_SKIPPED:
            raise DivergedError(f"{problem}, after {MOST_SKIPPED - 1} skipped steps; {ADVICE}")
        if not problem and math.isfinite(mean):
            before = mean if self._average is None else self._average
            self._average = KEPT * before + (1 - KEPT) * mean
        return problem

    def state(self) -> dict[str, Any]:
        """Return the average loss as {"average_loss": value}; {} if there is no average yet."""
        return {} if self._average is None else {"average_loss": self._average}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._average = state.get("average_loss")

    def _problem(self, mean: float) -> str:
        if not math.isfinite(mean):
            return "" if self._scale_falls else f"the loss is {mean}"
        average = math.inf if self._average is None else self._average
        if self._threshold is not None and mean > average + self._threshold:
            return f"the loss rose from {average:.4f} to {mean:.4f}"
        return ""

    def _over_ranks(self, loss: torch.Tensor) -> float:
        """Return the mean of `loss` over all ranks. Every rank gets the same number."""
        total = self.groups.sum_over_job(loss.detach().double().clone())
        return total.item() / self.groups.world_size


@contextmanager
def explained_overflow(engine: deepspeed.DeepSpeedEngine, step: int) -> Iterator[None]:
    """Raise an error with an explanation if fp16 gradients overflow at the minimum loss scale.

    The `with` block must contain one training step.

    Args:
        step: The number of the step, for the error message.

    Raises:
        DivergedError: The gradients overflow although the loss scale is at its minimum.
    """
    optimizer: Any = engine.optimizer  # its class depends on the precision and the ZeRO stage
    scaling = getattr(optimizer, "loss_scale_config", None)  # exists only without ZeRO
    least = scaling and scaling.dynamic_loss_scale and scaling.cur_scale == scaling.min_loss_scale
    try:
        yield  # at the minimum, DeepSpeed raises an unclear error under ZeRO, and none without it
    except Exception as error:
        if _SCALE_EXHAUSTED not in str(error):
            raise
    else:
        if not (least and optimizer.overflow):
            return
    scale = optimizer.loss_scale
    lower = ", lower min_loss_scale" if scale > 1 else ""
    raise DivergedError(
        f"fp16: the gradients overflow at step {step} even at the least loss scale, {scale:g}, so "
        f"no step can be taken any more; {ADVICE}{lower}, or train a new run in bf16, which does "
        "not overflow (bf16: {enabled: true}; `finetune: true` takes this run's weights)"
    )
