"""Save checkpoints during training, with the state of all hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.data.samples.loader import TrainLoader
from megatron.engine.checkpoint.async_save import Saver
from megatron.engine.checkpoint.record import TrainingProgress
from megatron.engine.training.hooks import Hook, Step, state_of


class Saving(Hook):
    """Writes checkpoints, and keeps the progress that the newest one holds.

    Args:
        saver: The object that writes the files; None if the run has no folder `save`.
        progress: The progress with which the run starts.
        loader: The batches of the run, which count the samples that were read.
        hooks: The hooks whose state a checkpoint holds.

    Attributes:
        progress: The progress after the last step that was to be saved. A run without a folder
            `save` writes no file then.
    """

    def __init__(
        self,
        saver: Saver | None,
        progress: TrainingProgress,
        loader: TrainLoader,
        hooks: Sequence[Hook],
    ):
        self._saver, self._loader, self._hooks = saver, loader, hooks
        self.progress = progress

    def before_step(self, number: int) -> None:
        if self._saver is not None:
            self._saver.check()

    def after_step(self, step: Step) -> None:
        if not (step.saves or step.leaves):
            return
        self.progress = replace(
            self.progress,
            step=step.number,
            consumed_samples=self._loader.consumed_samples,
            interval=state_of(self._hooks),
        )
        if self._saver is not None:
            self._saver.save(self.progress)

    def __exit__(self, *error: object) -> None:
        if self._saver is not None:
            self._saver.wait()
