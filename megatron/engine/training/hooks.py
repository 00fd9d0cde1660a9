"""Define hooks, the objects that the training loop calls before and after each step.

    open all hooks, then begin(step)
    for each step:      before_step(number), take the step, after_step(step)
    close all hooks, also after an error

The training loop has a list of hooks. After a step, the loop calls the hooks in the order of the
list. Before a step, the loop calls the hooks in the reverse order. Each hook saves and restores its
own state. A checkpoint contains the states of all hooks in one dict.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Step:
    """A training step that was just taken.

    Attributes:
        number: The number of the step, counted from 1.
        lr: The learning rate of the step.
        loss: This rank's loss, a 0-d tensor. The loss of the step is the mean of this loss over the
            data-parallel ranks.
        norm: The L2 norm of the gradient before clipping; None if it is not known.
        consumed_samples: The number of samples that the run has read, this step included.
        batch_size: The number of samples in a step, of all ranks.
        last: Whether this is the last step of the run.
        leaves: Whether the job ends early, after this step. A hook may set `leaves`.
        logs: Whether a log line is written after this step.
        validates: Whether a validation follows this step.
        saves: Whether a checkpoint is written after this step.
        good: Whether the step's loss counts in averages. It is false if the update was skipped.
    """

    number: int
    lr: float
    loss: torch.Tensor
    norm: float | torch.Tensor | None
    consumed_samples: int
    batch_size: int
    last: bool
    leaves: bool
    logs: bool
    validates: bool
    saves: bool
    good: bool = True

    @property
    def may_save(self) -> bool:
        """Whether a checkpoint may be written after this step or during its validation."""
        return self.saves or self.validates

    def samples(self, steps: int = 1) -> str:
        """Return a text that names the samples of the last `steps` steps, up to this one."""
        last = self.consumed_samples - 1
        return f"samples {last + 1 - steps * self.batch_size} to {last} of the split train"


class Hook(AbstractContextManager):
    """The base class of hooks. Its methods do nothing. A hook defines only the methods it needs.

    Every rank has the same hooks, so a hook may call collectives.
    """

    def begin(self, step: int) -> None:
        """Prepare for the steps after `step`."""

    def before_step(self, number: int) -> None:
        """Prepare for step `number`. If this method raises an error, the run ends."""

    def changed_loss(self, loss: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the loss that replaces `loss` in the backward pass.

        Args:
            loss: The loss of the step's last micro-batch.
            mean: This rank's mean loss over all micro-batches of the step.
        """
        # The loop calls this method before the backward pass of the step's last micro-batch.
        return loss

    def after_step(self, step: Step) -> None:
        """Process the step that was just taken."""

    def state(self) -> Mapping[str, Any]:
        """Return this hook's state for a checkpoint, as a dict from name to JSON value.

        No two hooks may use the same name.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore this hook from a checkpoint.

        Args:
            state: The state of all hooks; empty in a new run.
        """

    def __exit__(self, *error: object) -> None:
        pass


def state_of(hooks: Iterable[Hook]) -> dict[str, Any]:
    """Return the state of all hooks for a checkpoint. Every rank must call this function."""
    return {name: value for hook in hooks for name, value in hook.state().items()}
