"""Save checkpoints during training, with the state of all hooks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.data.samples.loader import TrainLoader
from megatron.engine.checkpoint.async_save import Saver
from megatron.engine.checkpoint.record import TrainingProgress
from megatron.engine.errors import CheckpointError, DivergedError
from megatron.engine.training.hooks import Hook, Step, state_of
from megatron.files import existing, why_unwritable
from megatron.run_folder import RunFolder


def require_writable(save: Path) -> None:
    """Check that the folder `save` can be written.

    Raises:
        CheckpointError: The folder cannot be created or written.
    """
    if why := why_unwritable(there := existing(save)):
        raise CheckpointError(f"save: {save}: {there} {why}; write another folder")


@contextmanager
def said_what_is_saved(save: str | None) -> Iterator[None]:
    """Name the newest checkpoint in the message of a DivergedError that the `with` block raises.

    Args:
        save: The folder with the run's checkpoints; None if the run saves no checkpoints.
    """
    try:
        yield
    except DivergedError as error:
        tag, problem = RunFolder(Path(save)).newest_tag() if save else (None, "")
        newest = f"The newest checkpoint is {Path(save or '', tag)}" if tag else ""
        there = newest or problem or "No checkpoint yet"
        raise type(error)(f"{error}. {there}") from error


@dataclass
class Saving(Hook):
    """A hook that writes checkpoints.

    Attributes:
        saver: The object that writes the checkpoints; None if the run saves no checkpoints.
        progress: The counters of the run at the newest checkpoint.
        loader: The loader of the run's batches, which counts the samples that were read.
        hooks: The hooks whose state is stored in a checkpoint.
    """

    # `progress` is updated after every step at which a checkpoint is due, even without a `saver`.

    saver: Saver | None
    progress: TrainingProgress
    loader: TrainLoader
    hooks: Sequence[Hook]

    def before_step(self, number: int) -> None:
        if self.saver is not None:
            self.saver.check()

    def after_step(self, step: Step) -> None:
        if not (step.saves or step.leaves):
            return
        self.progress = replace(
            self.progress,
            step=step.number,
            consumed_samples=self.loader.consumed_samples,
            interval=state_of(self.hooks),
        )
        if self.saver is not None:
            self.saver.save(self.progress)

    def __exit__(self, *error: object) -> None:
        if self.saver is not None:
            self.saver.wait()
