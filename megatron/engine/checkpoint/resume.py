"""Load the checkpoint that a job starts from: its weights, or its full training state.

The module `choose_start.py` selects this checkpoint.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed

from megatron.engine.checkpoint import relayout
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.publish import UNFINISHED
from megatron.engine.checkpoint.record import RunDescription, TrainingProgress
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import only_safe_loads, safe_load
from megatron.engine.training.optimizer import keep_hyperparameters
from megatron.engine.training.schedule import AnnealingLR
from megatron.files import plain_path, write_text
from megatron.parallel.groups import Groups
from megatron.parallel.rng import set_rng_state
from megatron.run_folder import RunFolder

if TYPE_CHECKING:
    from megatron.engine.local_model import Model
    from megatron.model.changed_positions import ChangedPositions


@dataclass
class Start:
    """The starting point of a job.

    Call `load_weights` before the DeepSpeed engine is built, and `finish` afterwards.

    Attributes:
        progress: The counters with which the job starts.
        text: Lines that describe the start in the log.
        saved: The checkpoint to start from; None for initial weights.
        resumes: Whether to load the full training state of `saved`, not only the weights.
        schedule: The learning-rate schedule that a published (GPT-NeoX) checkpoint records; None if
            there is none.
        save: The folder in which the job saves checkpoints; None if it saves none.
        lineage: The id of the run, which all its checkpoints record.
    """

    # The job uses `schedule` if the config sets `use_checkpoint_lr_scheduler`.

    progress: TrainingProgress
    text: str
    saved: Saved | None = None
    resumes: bool = False
    schedule: dict[str, Any] | None = None
    save: Path | None = None

    @cached_property
    def lineage(self) -> str:
        return self.saved.record.lineage if self.saved and self.resumes else uuid.uuid4().hex

    def load_weights(
        self,
        model: Model,
        run: RunDescription,
        groups: Groups,
        change: ChangedPositions | None = None,
    ) -> None:
        """Load the weights of `self.saved` into the model.

        Args:
            change: The old and new positional embeddings, if they differ.
        """
        # Nothing is done if `finish` will load them later.
        if self.saved is not None and not self.resumes:
            notes = load_weights(model, self.saved, run, groups, change)
            self.text = "\n".join([self.text, *notes])

    def finish(
        self,
        engine: deepspeed.DeepSpeedEngine,
        annealing: AnnealingLR,
        groups: Groups,
        run: RunDescription,
    ) -> TrainingProgress:
        """Load the training state into the engine, and return the counters at the job's start.

        If `self.resumes` is false, no state is loaded, and the engine only gets the number of its
        first step. Every rank must call this method.
        """
        step = self.progress.step
        if self.saved is not None and self.resumes:
            self.saved.require_same(run, "model", "data")
            with keep_hyperparameters(annealing, engine.optimizer):
                work = self.save or self.saved.folder
                self.progress = restore(engine, groups, self.saved, run, work)
            trains = self.progress.step < run.config.get("train_iters", 0)
            if groups.is_main and trains and self.saved.folder == self.save:
                set_aside_later(self.saved)
        elif step:
            curve = self.schedule or annealing.state_dict()
            annealing.load_state_dict(curve | {"num_iters": step})
            engine.global_steps = step
        return self.progress


def set_aside_later(saved: Saved) -> None:
    """Rename the checkpoints of later steps than `saved`, from which the run goes on.

    They are damaged, or the run goes on without them. So they must neither count as checkpoints to
    keep, nor be used when a later checkpoint is damaged.
    """
    folder = RunFolder(saved.folder)
    for tag in folder.tags(after=saved.step):
        write_text(folder.latest, saved.tag)
        aside = saved.path.with_name(f"{tag}.passed-over-{time.time_ns()}")
        (saved.folder / tag).rename(aside)
        print(
            f"{saved.folder / tag} is later than {saved.tag}: renamed to {aside.name}", flush=True
        )


def restore(
    engine: deepspeed.DeepSpeedEngine, groups: Groups, saved: Saved, run: RunDescription, work: Path
) -> TrainingProgress:
    """Load the full training state of the checkpoint `saved`. Every rank must call this function.

    The state consists of weights, optimizer, schedule and random streams. A checkpoint of another
    parallel layout is converted first, and dropout then uses new random streams.

    Args:
        work: A writable folder for the converted checkpoint.

    Raises:
        CheckpointError: A file is missing or damaged, or the checkpoint cannot be converted to the
            layout of this run.
    """
    written, layout = saved.record.layout, run.layout
    resharded = layout["model_parallel_size"] > 1 and saved.record.cuts != run.cuts
    if written != layout or resharded:
        why = relayout.why_not_resumed(written, layout)
        if why or saved.step == 0:
            why = why or "step 0 has no optimizer state to convert"
            raise CheckpointError(
                f"{saved.path} was written with another layout, and {why}. Resume with the layout "
                "it was written with, or set `finetune: true` and another `save` to load only its "
                "weights"
            )
        changes = [f"{k} {written[k]} -> {v}" for k, v in layout.items() if written[k] != v]
        changed = ", ".join(changes) or "weights are sharded differently"
        relayout.restore(engine, groups, saved, work / f"{UNFINISHED}universal", run.cuts, changed)
        return saved.record.progress
    try:
        with only_safe_loads(), plain_path(saved.folder) as folder:
            loaded, _ = engine.load_checkpoint(str(folder), tag=saved.tag)
        set_rng_state(safe_load(saved.path / f"rng_rank_{groups.rank:05d}.pt"))
    except Exception as error:  # any error: checkpoints of early versions have no checksums
        raise CheckpointError(
            f"{saved.path}: cannot be loaded on rank {groups.rank} ({type(error).__name__}: "
            f"{error}); if a file is damaged, write the name of an older checkpoint into "
            f"{RunFolder(saved.folder).latest}"
        ) from error
    if loaded is None:
        raise CheckpointError(f"{saved.path}: DeepSpeed found nothing to load there")
    return saved.record.progress
