"""Where a job starts: afresh, from a checkpoint's weights, or exactly where one left off.

| `load` names | start |
|---|---|
| nothing, or a folder without a checkpoint | step 0, initial weights |
| a checkpoint of this code | where it left off: weights, optimizer, schedule, random streams |
| any checkpoint, with `finetune: true` | step 0, its weights (`save` resumes, if it has begun) |
| a published or imported checkpoint | its step and weights; the optimizer's moments are zero |
| any checkpoint, with `train_iters: 0` | its step and weights, to be evaluated only |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.engine import checkpoint
from megatron.engine.checkpoint import CheckpointError, Progress
from megatron.engine.folders import remove_unfinished
from megatron.engine.neox_checkpoint import is_published
from megatron.engine.neox_counters import counters
from megatron.engine.optim import own_hyperparameters
from megatron.engine.schedule import AnnealingLR
from megatron.engine.weights import load_weights
from megatron.model import GPT
from megatron.parallel import Groups

if TYPE_CHECKING:
    import deepspeed

About = dict[str, dict[str, Any]]
"""What a run and a checkpoint must agree on: model, data, layout."""


@dataclass
class Start:
    """A decision; `load_weights` before the engine is built, `finish` after.

    Attributes:
        progress: where the job begins.
        text: lines that say so.
        folder, tag: the checkpoint; None for a fresh start.
        resumes: everything is taken, not the weights alone.
        schedule: a published checkpoint's learning-rate curve, for `use_checkpoint_lr_scheduler`.
    """

    progress: Progress
    text: str
    folder: Path | None = None
    tag: str = ""
    resumes: bool = False
    schedule: dict[str, Any] | None = None

    def load_weights(self, model: GPT, about: About) -> None:
        """Into the model, where weights alone are taken: before an engine copies them."""
        if self.folder is not None and not self.resumes:
            notes = load_weights(model, self.folder, self.tag, about["model"])
            self.text = "\n".join([self.text, *notes])

    def finish(
        self,
        engine: deepspeed.DeepSpeedEngine,
        annealing: AnnealingLR,
        groups: Groups,
        about: About,
    ) -> Progress:
        """The engine's part; every rank must call it."""
        step = self.progress.step
        if self.resumes:
            checkpoint.require_same(self.folder, self.tag, about)
            with own_hyperparameters(annealing):
                self.progress = checkpoint.restore(engine, groups, self.folder, self.tag)
        elif step:
            curve = self.schedule or annealing.state_dict()
            annealing.load_state_dict(curve | {"num_iters": step})
            engine.global_steps = step
        return self.progress


def choose_start(config: Config, groups: Groups, train_samples: int) -> Start:
    """Look at `load` and `save` and decide.

    Args:
        train_samples: samples that this run's training index is built for.

    Raises:
        CheckpointError: a checkpoint is damaged; `save` holds another run's, which would be
            replaced one by one; or there is nothing to evaluate.
    """
    c, trains = config.checkpoint, config.training.train_iters > 0
    save, load = (Path(name) if name else None for name in (c.save, c.load))
    if save and groups.is_main:
        left = remove_unfinished(save)
        if left:
            print(f"removed what a killed run left half written: {', '.join(left)}")
    groups.barrier()
    fresh = Progress(0, 0, train_samples)
    saved = checkpoint.newest(save) if save else None
    if saved and c.finetune and trains:
        text = f"resuming the finetuning from {save / saved}"
        return Start(fresh, text, save, saved, resumes=True)
    loaded = checkpoint.newest(load) if load else None
    if trains and saved and (not loaded or save.resolve() != load.resolve()):
        raise CheckpointError(
            f"save: {save} holds a checkpoint already ({saved}), and this run does not "
            f"continue it; write `load: {save}` to continue, or another `save` for a new run"
        )
    if not load:
        return Start(fresh, "starting fresh: no `load` in the config")
    if not loaded:
        if not trains:
            raise CheckpointError(
                f"{load} holds no checkpoint (no file `latest`), and train_iters: 0 does nothing "
                "but evaluate one; name the folder that holds `latest`"
            )
        return Start(fresh, f"starting fresh: {load} holds no checkpoint")
    if c.finetune:
        text = f"starting at step 0 from the weights of {load / loaded} (finetune)"
        return Start(fresh, text, load, loaded)
    if trains and not checkpoint.is_foreign(load, loaded):
        return Start(fresh, f"resuming from {load / loaded}", load, loaded, resumes=True)
    return _from_weights(config, load, loaded, train_samples)


def _from_weights(config: Config, folder: Path, tag: str, train_samples: int) -> Start:
    """At the checkpoint's step, with its weights alone."""
    where = folder / tag
    if is_published(where):
        step, schedule = counters(where)
    else:
        record = checkpoint.read_record(folder, tag)
        step, schedule = record["progress"]["step"], record.get("imported", {}).get("schedule")
    text = f"evaluating {where}, trained for {step} steps"
    if config.training.train_iters > 0:
        text = (
            f"going on at step {step} from the weights of {where}, a published checkpoint: the "
            "optimizer's moments start at zero, samples are counted as step x train_batch_size"
        )
    progress = Progress(step, step * config.batch.train_batch_size, train_samples)
    return Start(progress, text, folder, tag, schedule=schedule)
