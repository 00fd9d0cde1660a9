"""Define what hangs on the training loop: hooks, which the loop calls around its steps.

    open all hooks, then begin(step)
    for each step:      before_step(number), take the step, after_step(step)
    close all hooks, also after an error

After a step, the loop calls the hooks in the order of its list, and before a step in the reverse
order: the first hook of the list is the nearest to the step. Each hook saves and restores its own
state. A checkpoint holds the values of all hooks in one dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch


@dataclass
class Step:
    """A training step that was just taken.

    Attributes:
        number: The number of the step, counted from 1.
        lr: The learning rate of the step.
        loss: This rank's mean loss of the step, a 0-d tensor.
        norm: The L2 norm of the gradient before clipping; None if it is not known.
        consumed_samples: The number of samples that the run has read, this step included.
        batch_size: The number of samples in a step, of all ranks.
        last: Whether this is the step `train_iters`.
        leaves: Whether the job ends after this step, before `train_iters`. A hook may set it.
        saves: Whether a checkpoint is written after this step.
        good: Whether the step's loss counts. The guard sets it to false if it skips the update.
    """

    number: int
    lr: float
    loss: torch.Tensor
    norm: float | torch.Tensor | None
    consumed_samples: int
    batch_size: int
    last: bool
    leaves: bool
    saves: bool
    good: bool = True

    def samples(self, steps: int = 1) -> str:
        """Return a text that names the samples of the last `steps` steps, this one included."""
        last = self.consumed_samples - 1
        return f"samples {last + 1 - steps * self.batch_size} to {last} of the split train"


class Hook:
    """The base class of hooks. Each method does nothing if a hook does not define it.

    Every rank has the same hooks, so a hook may call collectives.
    """

    def begin(self, step: int) -> None:
        """Prepare for the steps after `step`."""

    def before_step(self, number: int) -> None:
        """Act before step `number`. An error ends the run."""

    def changed_loss(self, loss: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the loss of the step's last micro-batch that goes into the backward pass.

        Args:
            loss: The loss of this micro-batch.
            mean: This rank's mean loss over all micro-batches of the step.
        """
        return loss

    def after_step(self, step: Step) -> None:
        """Act after a step."""

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint must hold of this hook, as JSON values with names of its own."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take this hook's values out of the state of all hooks; a new run's state is empty."""

    def __enter__(self) -> Hook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


def state_of(hooks: Iterable[Hook]) -> dict[str, Any]:
    """Return the state of all hooks for a checkpoint. Every rank must call this function."""
    return {name: value for hook in hooks for name, value in hook.state().items()}
